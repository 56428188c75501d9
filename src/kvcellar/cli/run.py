"""``kvcellar run``: complete a prompt and print the text as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli import options as o
from kvcellar.cli.console import Interrupt, Output, read_prompt
from kvcellar.cli.conversation import chat_ids, messages_of
from kvcellar.cli.prefill import read_tokens
from kvcellar.cli.prompt_store import PromptStore, stored_at_end
from kvcellar.cli.stats import print_profile, print_stats

if TYPE_CHECKING:
    from kvcellar.prompts.cache import CacheHit, PromptCache
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence

PromptText = Annotated[
    str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - or absent: read stdin.")
]
AsChat = Annotated[
    bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
]


def run(
    model: o.ModelName,
    prompt: PromptText = None,
    max_tokens: o.MaxTokens = 256,
    stop: o.Stop = None,
    chat: AsChat = False,
    system: o.System = None,
    stats: o.ShowStats = False,
    profile: o.ShowProfile = False,
    temperature: o.Temperature = 0.8,
    top_k: o.TopK = 40,
    top_p: o.TopP = 0.95,
    min_p: o.MinP = 0.05,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    seed: o.Seed = None,
    n_ctx: o.NCtx = None,
    type_k: o.TypeK = "f16",
    type_v: o.TypeV = "f16",
    threads: o.Threads = None,
    n_ubatch: o.NUbatch = 512,
    prompt_cache: o.PromptCacheAt = None,
    cache_salt: o.CacheSalt = None,
    cache_bytes: o.CacheBytes = None,
    cache_ttl: o.CacheTtl = None,
) -> None:
    """Complete a prompt; the text goes to stdout as it is generated.

    With --chat or --system the prompt is a message, which the model answers.
    """
    output = Output()
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    sampling = o.sampling(temperature, top_k, top_p, min_p, penalties, seed)
    text = read_prompt(prompt)
    setup = o.Setup(model, n_ctx, type_k, type_v, threads, n_ubatch)
    answering = o.Answering(max_tokens, stop, sampling, n_ubatch)
    stored = PromptStore(prompt_cache, cache_salt, cache_bytes, cache_ttl)
    with setup.open() as context, stored.open() as prompts:
        recorded = context.start_profile() if profile else None
        ids = _prompt_ids(context, text, system, chat or system is not None)
        done = Completion(context.sequence())
        with stored_at_end(prompts, done.sequence):
            try:
                complete(done, ids, output, answering, prompts)
            finally:
                output.end()
                if stats:
                    print_stats(context, output.seconds_to_first, done.hit)
                if recorded is not None:
                    print_profile(recorded)


@dataclass(slots=True)
class Completion:
    """A sequence, and what a prompt cache had of its prompt, once that is known."""

    sequence: Sequence
    hit: CacheHit | None = None


def complete(
    done: Completion,
    ids: list[int],
    output: Output,
    answering: o.Answering,
    prompts: PromptCache | None,
) -> None:
    """Compute a prompt, as far as it is not stored, and write what follows it.

    Raises:
        BatchError: the prompt is empty.
        CacheFull: no cell is left; what was generated has been written.
        KeyboardInterrupt: Ctrl-C was pressed; likewise.
    """
    with Interrupt() as interrupt:
        done.hit = read_tokens(done.sequence, ids, answering.n_ubatch, interrupt, prompts)
        for piece in answering.stream(done.sequence):
            output.write(piece)
            interrupt.check()


def _prompt_ids(context: Context, text: str, system: str | None, as_chat: bool) -> list[int]:
    if as_chat:
        return chat_ids(context.model, messages_of(text, system))
    return context.model.tokenizer.encode(text)
