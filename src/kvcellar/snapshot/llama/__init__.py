"""llama.cpp's state files, read and written; ``docs/format-llama.md`` describes them."""
