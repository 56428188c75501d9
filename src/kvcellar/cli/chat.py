"""``kvcellar chat``: a conversation, a line a message.

With a terminal at both ends there is a prompt and a greeting; otherwise each line of stdin is a
message and nothing but the answers goes to stdout.
"""

from __future__ import annotations

import sys

import typer

from kvcellar.cli import options as o
from kvcellar.cli.conversation import Conversation, Repl
from kvcellar.cli.prompt_store import PromptStore, stored_at_end


def chat(
    model: o.ModelName,
    system: o.System = None,
    max_tokens: o.MaxTokens = 512,
    stop: o.Stop = None,
    stats: o.ShowStats = False,
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
    """Talk to a model; of each turn only what is new is computed.

    /help lists the commands. Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    sampling = o.sampling(temperature, top_k, top_p, min_p, penalties, seed)
    setup = o.Setup(model, n_ctx, type_k, type_v, threads, n_ubatch)
    answering = o.Answering(max_tokens, stop, sampling, n_ubatch)
    stored = PromptStore(prompt_cache, cache_salt, cache_bytes, cache_ttl)
    with setup.open() as context, stored.open() as prompts:
        talk = Conversation(context, answering, system, prompts)
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        with stored_at_end(prompts, talk.sequence):
            n_failed = Repl(talk, interactive=interactive, stats=stats).talk()
    if n_failed:
        raise typer.Exit(1)
