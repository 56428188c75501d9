"""The options that commands share, and what they are gathered into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.errors import CacheFull, OptionError

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence
    from kvcellar.text.sampler import SamplerOptions

_SAMPLING, _CACHE = "Sampling", "Cache and computation"
_PROMPTS = "Prompts computed before"
_MOST_TOKENS = 2**31 - 1

ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A GGUF file, or smollm2 for the demo model."),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-n", help="Tokens at most; -1: until a stop or a full cache."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Stop at this text; may be given several times."),
]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
ShowStats = Annotated[bool, typer.Option("--stats", help="Speed, cells and bytes, on stderr.")]
ShowProfile = Annotated[
    bool, typer.Option("--profile", help="Where the time went, on stderr; slows the run.")
]

Temperature = Annotated[
    float,
    typer.Option("--temperature", "-t", help="0: the best token.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[int, typer.Option("--top-k", help="0: off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option("--top-p", help="1: off.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option("--min-p", help="0: off.", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="1: off.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option("--presence-penalty", help="0: off.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="0: off.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Makes a run repeatable.", rich_help_panel=_SAMPLING)
]

NCtx = Annotated[
    int | None,
    typer.Option(
        "--n-ctx", help="Cells; default: as trained, at most 4096.", rich_help_panel=_CACHE
    ),
]
TypeK = Annotated[str, typer.Option("--type-k", help="Storage type of K.", rich_help_panel=_CACHE)]
TypeV = Annotated[str, typer.Option("--type-v", help="Storage type of V.", rich_help_panel=_CACHE)]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Default: all processors.", rich_help_panel=_CACHE),
]
NUbatch = Annotated[
    int, typer.Option("--n-ubatch", help="Tokens computed at once.", rich_help_panel=_CACHE)
]


def _named(where: str | None) -> str | None:
    """The place itself; an empty one, an unset variable perhaps, would be the current folder."""
    if where == "":
        raise OptionError("--prompt-cache is empty: name a folder or a URL")
    return where


PromptCacheAt = Annotated[
    str | None,
    typer.Option(
        "--prompt-cache",
        callback=_named,
        metavar="DIR_OR_URL",
        help="Restore what is stored there of the prompt, and store what is computed.",
        rich_help_panel=_PROMPTS,
    ),
]
CacheSalt = Annotated[
    str | None,
    typer.Option(
        "--cache-salt",
        metavar="TEXT",
        help="What is stored under another salt is not found.",
        rich_help_panel=_PROMPTS,
    ),
]
CacheBytes = Annotated[
    str | None,
    typer.Option(
        "--cache-bytes",
        metavar="SIZE",
        help="What a folder may take (10G); what is unused for longest leaves.",
        rich_help_panel=_PROMPTS,
    ),
]
CacheTtl = Annotated[
    str | None,
    typer.Option(
        "--cache-ttl",
        metavar="AGE",
        help="How long a server keeps what nobody uses (for good).",
        rich_help_panel=_PROMPTS,
    ),
]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a context is made of."""

    model: str
    n_ctx: int | None
    type_k: str
    type_v: str
    threads: int | None
    n_ubatch: int

    @contextmanager
    def open(self) -> Iterator[Context]:
        """A context for one sequence; model and context are closed at the end."""
        from kvcellar.runtime.demo import find_model
        from kvcellar.runtime.model import Model

        with Model.from_gguf(find_model(self.model), n_threads=self.threads) as model:
            yield model.context(
                n_ctx=self.n_ctx,
                n_seq_max=1,
                n_ubatch=self.n_ubatch,
                type_k=self.type_k,
                type_v=self.type_v,
            )


@dataclass(frozen=True, slots=True)
class Answering:
    """How prompts are read and answered.

    Attributes:
        max_tokens: of one answer; -1 is no limit.
        stop: texts that end an answer.
        sampling: how tokens are chosen.
        n_ubatch: how many tokens of a prompt are computed at once.

    Raises:
        OptionError: no such number of tokens.
    """

    max_tokens: int
    stop: list[str] | None
    sampling: SamplerOptions
    n_ubatch: int

    def __post_init__(self) -> None:
        if not -1 <= self.max_tokens <= _MOST_TOKENS:
            allowed = f"-1 (no limit) or in [0, {_MOST_TOKENS}]"
            raise OptionError(f"--max-tokens (-n) must be {allowed}, found {self.max_tokens}")

    def stream(self, sequence: Sequence) -> Iterator[str]:
        """The answer to what a sequence holds.

        Raises:
            CacheFull: no cell is left.
        """
        limit = None if self.max_tokens == -1 else self.max_tokens
        try:
            yield from sequence.stream(limit, stop=self.stop or (), options=self.sampling)
        except CacheFull as error:
            raise CacheFull(error.needed, error.free, "use a larger --n-ctx") from error


def sampling(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, float, float],
    seed: int | None,
) -> SamplerOptions:
    """How to sample; the penalties are those of repetition, presence and frequency.

    Raises:
        OptionError: a value outside its range.
    """
    from kvcellar.text.sampler import SamplerOptions

    repetition, presence, frequency = penalties
    return SamplerOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=seed,
    )
