"""The options that commands share.

Options that belong together are the fields of a dataclass, which also does what they ask for. A
command takes the dataclass as one parameter; :func:`expand_groups` puts its fields in its place.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import typer

from kvcellar.cli.console import note, one_line
from kvcellar.errors import CacheFull, OptionError, check_path
from kvcellar.files import open_regular, why

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence
    from kvcellar.text.grammar import Grammar
    from kvcellar.text.sampler import SamplerOptions

Command: TypeAlias = Callable[..., None]

MODEL_HELP = "GGUF file, or smollm2 for the demo model."
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-n", help="Maximum number of tokens to generate; -1: no limit."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Stop at this text; can be repeated."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")]
Pre = Annotated[
    str | None,
    typer.Option(
        "--pre", metavar="NAME", help="Pre-tokenizer to use instead of the one the file names."
    ),
]
ShowStats = Annotated[
    bool, typer.Option("--stats", help="Print speed, cells and memory to stderr.")
]

_sampling = partial(typer.Option, rich_help_panel="Sampling")
_grammar = partial(typer.Option, rich_help_panel="Grammars")
_computing = partial(typer.Option, rich_help_panel="Cache and computation")


def expand_groups(command: Command) -> Command:
    """Return a command that has the fields of its dataclass parameters as options."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _field_parameters(parameter.annotation)
        else:
            parameters.append(parameter)

    @wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return call


def _field_parameters(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen."""

    temperature: Annotated[
        float, _sampling("--temperature", "-t", help="0: always take the most likely token.")
    ] = 0.8
    top_k: Annotated[int, _sampling("--top-k", help="Keep the k most likely tokens; 0: off.")] = 40
    top_p: Annotated[
        float,
        _sampling(
            "--top-p", help="Keep the most likely tokens up to this total probability; 1: off."
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        _sampling(
            "--min-p", help="Drop tokens less likely than this fraction of the best; 0: off."
        ),
    ] = 0.05
    repetition_penalty: Annotated[
        float,
        _sampling("--repetition-penalty", help="Divide the logits of tokens already seen; 1: off."),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        _sampling(
            "--presence-penalty",
            help="Subtract once from the logits of tokens already seen; 0: off.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        _sampling("--frequency-penalty", help="Subtract for each time a token was seen; 0: off."),
    ] = 0.0
    seed: Annotated[
        int | None,
        _sampling("--seed", help="Random seed; makes a run repeatable.", show_default="random"),
    ] = None

    def checked(self) -> SamplerOptions:
        """Return the sampler's options.

        Raises:
            OptionError: a value outside its range.
        """
        from kvcellar.text.sampler import SamplerOptions

        return SamplerOptions(**asdict(self))


@dataclass(frozen=True, slots=True)
class Constraining:
    """What an answer may be."""

    json_schema: Annotated[
        str | None,
        _grammar("--json-schema", metavar="JSON|FILE", help="Answer with JSON of this schema."),
    ] = None
    regex: Annotated[
        str | None,
        _grammar("--regex", metavar="PATTERN", help="Answer with what matches as a whole."),
    ] = None
    grammar: Annotated[
        str | None, _grammar("--grammar", metavar="TEXT", help="Answer with this grammar, in GBNF.")
    ] = None
    grammar_file: Annotated[
        str | None,
        _grammar(
            "--grammar-file", metavar="FILE", help="The same of a file; Lark in a .lark file."
        ),
    ] = None

    def checked(self) -> Grammar | None:
        """Return the grammar that is asked for, if any.

        Raises:
            OptionError: two of them, or a file that cannot be read.
            GrammarError: it is wrong.
        """
        asked = {name: text for name, text in asdict(self).items() if text is not None}
        if not asked:
            return None
        if len(asked) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise OptionError(f"{names}: give one of them")
        from kvcellar.text.grammar import Grammar

        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.grammar is not None:
            return Grammar.gbnf(self.grammar)
        if self.json_schema is not None:
            is_json = self.json_schema.lstrip()[:1] in ("{", "")
            return Grammar.json_schema(
                self.json_schema if is_json else _read("--json-schema", self.json_schema)
            )
        file = str(self.grammar_file)
        text = _read("--grammar-file", file)
        return Grammar.lark(text) if file.endswith(".lark") else Grammar.gbnf(text)


def _read(option: str, name: str) -> str:
    path = check_path(option, name)
    try:
        with open_regular(path) as file:
            return file.read(_MOST_BYTES).decode()
    except OSError as error:
        raise OptionError(f"{option}: {name} cannot be read: {why(error)}") from error
    except UnicodeDecodeError:
        raise OptionError(f"{option}: {name} is no text in UTF-8") from None


_MOST_BYTES = 2**20  # more than a grammar may have


@dataclass(frozen=True, slots=True)
class Computing:
    """How the cache is made and what computes."""

    n_ctx: Annotated[
        int | None,
        _computing(
            "--n-ctx",
            help="Size of the cache in cells, one a token.",
            show_default="as trained, at most 4096",
        ),
    ] = None
    type_k: Annotated[
        str, _computing("--type-k", help="Storage type of K, such as f16, q8_0 or q4_0.")
    ] = "f16"
    type_v: Annotated[str, _computing("--type-v", help="Storage type of V, likewise.")] = "f16"
    threads: Annotated[
        int | None,
        _computing("--threads", help="Number of compute threads.", show_default="all processors"),
    ] = None
    n_ubatch: Annotated[int, _computing("--n-ubatch", help="Prompt tokens computed at once.")] = 512
    pre: Pre = None

    @contextmanager
    def open(self, model_name: str) -> Iterator[Context]:
        """Yield a context for one sequence; close it and its model at the end."""
        from kvcellar.runtime.demo import find_model
        from kvcellar.runtime.model import Model

        path = find_model(model_name)
        with Model.from_gguf(path, n_threads=self.threads, pre=self.pre) as model:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                context = model.context(
                    n_ctx=self.n_ctx,
                    n_seq_max=1,
                    n_ubatch=self.n_ubatch,
                    type_k=self.type_k,
                    type_v=self.type_v,
                )
            note(*(f"warning: {one_line(str(one.message))}" for one in caught))
            yield context


_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Answering:
    """How prompts are answered.

    Attributes:
        max_tokens: of one answer; -1 is no limit.
        stop: texts that end an answer.
        sampling: how tokens are chosen.
        grammar: what an answer may be.

    Raises:
        OptionError: ``max_tokens`` is out of range.
    """

    max_tokens: int
    stop: list[str] | None
    sampling: SamplerOptions
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not -1 <= self.max_tokens <= _MOST_TOKENS:
            allowed = f"-1 (no limit) or in [0, {_MOST_TOKENS}]"
            raise OptionError(f"--max-tokens (-n) must be {allowed}, found {self.max_tokens}")

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None: no limit."""
        return None if self.max_tokens == -1 else self.max_tokens

    def stream(self, sequence: Sequence) -> Iterator[str]:
        """Generate what follows a sequence, piece by piece.

        Raises:
            CacheFull: no cell is left.
            GrammarError: the grammar is wrong, or cannot be followed.
        """
        return self.hinted(
            sequence.stream(
                self.limit, stop=self.stop or (), options=self.sampling, grammar=self.grammar
            )
        )

    def hinted(self, pieces: Iterator[str]) -> Iterator[str]:
        """Yield what comes; a full cache is told with the option that helps."""
        try:
            yield from pieces
        except CacheFull as error:
            raise CacheFull(error.needed, error.free, "use a larger --n-ctx") from error
