"""``kvcellar run``: answer a prompt, or complete it, and print the text as it is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli import options as o
from kvcellar.cli.console import Output, note
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.prompt import Templates, messages_of, read_prompt, read_tokens
from kvcellar.cli.prompt_cache import PromptCacheOptions, stored_at_end
from kvcellar.cli.stats import print_profile, print_stats
from kvcellar.errors import BatchError, OptionError

if TYPE_CHECKING:
    from kvcellar.prompts.cache import CacheHit
    from kvcellar.runtime.model import Model

PromptText = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="What to say; read from stdin if - or absent."),
]
PromptFile = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a file of UTF-8."),
]
AsChat = Annotated[
    bool, typer.Option("--chat", help="Insist on a chat template: a model without one is an error.")
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Complete the prompt as it is, without the chat template.")
]
ShowProfile = Annotated[
    bool,
    typer.Option("--profile", help="Print where the time goes to stderr; slows the run a little."),
]


def run(
    model: o.ModelName,
    prompt: PromptText = None,
    *,
    prompt_file: PromptFile = None,
    max_tokens: o.MaxTokens = 256,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    raw: Raw = False,
    chat: AsChat = False,
    system: o.System = None,
    stats: o.ShowStats = False,
    profile: ShowProfile = False,
    sampling: o.Sampling,
    constraining: o.Constraining,
    templates: Templates,
    computing: o.Computing,
    cache: PromptCacheOptions,
) -> None:
    """Answer a prompt and print the text as it is generated.

    If the model has a chat template the prompt is a message in it;
    with --raw it is a text to complete.
    """
    if raw and (chat or system is not None):
        raise OptionError("--raw takes no chat template: leave out --chat and --system")
    output = Output()
    answering = o.Answering(
        max_tokens, stop, sampling.checked(), constraining.checked(), ignore_eos
    )
    text = read_prompt(prompt, prompt_file)
    if not text:
        raise BatchError("the prompt is empty")
    with computing.open(model) as context, cache.open() as prompts:
        recorded = context.start_profile() if profile else None
        template, variables = templates.chosen()
        asked = chat or system is not None or template is not None or bool(variables)
        if asked or (not raw and has_template(context.model)):
            chosen = context.model.chat_format(template)
            ids = list(chosen.prompt(messages_of(text, system), variables=variables))
        else:
            ids = context.model.tokenizer.encode(text)
        sequence, sampler = context.sequence(), answering.sampler(context.model.tokenizer)
        hit: CacheHit | None = None
        with stored_at_end(prompts, sequence):
            try:
                with Interrupt() as interrupt:
                    hit = read_tokens(sequence, ids, interrupt, prompts)
                    for piece in answering.stream(sequence, sampler):
                        output.write(piece)
                        interrupt.check()
                if not stats:
                    output.end()
                    note_end(sequence.finish_reason, len(sequence) - len(ids), max_tokens)
            finally:
                output.end()
                if stats:
                    print_stats(sequence, sampler.seed, output.seconds_to_first, hit)
                if recorded is not None:
                    print_profile(recorded)


def has_template(model: Model) -> bool:
    """Whether a model is one to talk to: it has text, and a chat template."""
    return model.tokenizer.has_text and bool(model.metadata.get("tokenizer.chat_template"))


def note_end(reason: str | None, n_tokens: int, max_tokens: int) -> None:
    """Say on stderr why there is no more text, where that is not plain to see."""
    if reason == "length" and max_tokens:
        note(f"(cut off after {n_tokens} tokens; -n allows more)")
    elif reason == "stop_token" and n_tokens == 0:
        note("(the model ended the text at once)")
