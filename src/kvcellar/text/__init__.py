"""From text to tokens to the next token: vocabularies, templates, sampling."""
