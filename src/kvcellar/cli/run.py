"""``kvcellar run``: complete a prompt and print the text as it is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli import options as o
from kvcellar.cli.console import Output
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.prompt import chat_ids, messages_of, read_prompt, read_tokens
from kvcellar.cli.prompt_cache import PromptCacheOptions, stored_at_end
from kvcellar.cli.stats import print_profile, print_stats

if TYPE_CHECKING:
    from kvcellar.prompts.cache import CacheHit

PromptText = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="Text to complete; read from stdin if - or absent."),
]
PromptFile = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a file of UTF-8."),
]
AsChat = Annotated[
    bool, typer.Option("--chat", help="Treat the prompt as a chat message to answer.")
]
ShowProfile = Annotated[
    bool,
    typer.Option("--profile", help="Print where the time goes to stderr; slows the run a little."),
]


def run(
    model: o.ModelName,
    prompt: PromptText = None,
    *,
    file: PromptFile = None,
    max_tokens: o.MaxTokens = 256,
    stop: o.Stop = None,
    chat: AsChat = False,
    system: o.System = None,
    stats: o.ShowStats = False,
    profile: ShowProfile = False,
    sampling: o.Sampling,
    computing: o.Computing,
    cache: PromptCacheOptions,
) -> None:
    """Complete a prompt and print the text as it is generated.

    With --chat or --system the prompt is a message in the model's chat
    template, and the model answers it.
    """
    output = Output()
    answering = o.Answering(max_tokens, stop, sampling.checked())
    text = read_prompt(prompt, file)
    with computing.open(model) as context, cache.open() as prompts:
        recorded = context.start_profile() if profile else None
        if chat or system is not None:
            ids = chat_ids(context.model, messages_of(text, system))
        else:
            ids = context.model.tokenizer.encode(text)
        sequence = context.sequence()
        hit: CacheHit | None = None
        with stored_at_end(prompts, sequence):
            try:
                with Interrupt() as interrupt:
                    hit = read_tokens(sequence, ids, interrupt, prompts)
                    for piece in answering.stream(sequence):
                        output.write(piece)
                        interrupt.check()
            finally:
                output.end()
                if stats:
                    print_stats(context, output.seconds_to_first, hit)
                if recorded is not None:
                    print_profile(recorded)
