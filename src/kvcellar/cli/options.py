"""The options that commands share.

Options that belong together are the fields of a dataclass, which also does what they ask for. A
command takes the dataclass as one parameter; :func:`expand_groups` puts its fields in its place.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import typer

from kvcellar.cli.console import note, one_line
from kvcellar.errors import CacheFull, OptionError, check_path, shown
from kvcellar.files import open_regular, why

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence
    from kvcellar.text.grammar import Grammar
    from kvcellar.text.sampler import Sampler, SamplerOptions
    from kvcellar.text.tokenizer import Tokenizer

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
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on where the model would end the text.")
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
_penalties = partial(typer.Option, rich_help_panel="Penalties")
_more = partial(typer.Option, rich_help_panel="More samplers")
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
    """How tokens are chosen; flags have llama.cpp's names."""

    temperature: Annotated[
        float, _sampling("--temperature", "--temp", help="0: always take the most likely token.")
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
    seed: Annotated[
        int | None,
        _sampling(
            "--seed", help="Random seed; makes a run repeatable. -1: random.", show_default="random"
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _sampling(
            "--logit-bias",
            "-l",
            metavar="ID=VALUE",
            help="Add to the logit of a token, also ID+VALUE or ID-VALUE; can be repeated.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float,
        _penalties(
            "--repetition-penalty",
            "--repeat-penalty",
            help="Divide the logits of tokens already seen; 1: off.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        _penalties(
            "--presence-penalty",
            help="Subtract once from the logits of tokens already seen; 0: off.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        _penalties("--frequency-penalty", help="Subtract for each time a token was seen; 0: off."),
    ] = 0.0
    penalty_last_n: Annotated[
        int,
        _penalties("--repeat-last-n", help="How many of the last tokens count as seen; -1: all."),
    ] = 64
    penalty_over: Annotated[
        str,
        _penalties(
            "--penalty-over",
            metavar="window|answer",
            help="Count the last tokens, or the answer alone as OpenAI does.",
        ),
    ] = "window"
    dry_multiplier: Annotated[
        float,
        _penalties("--dry-multiplier", help="DRY: scale of the penalty of repetitions; 0: off."),
    ] = 0.0
    dry_base: Annotated[
        float, _penalties("--dry-base", help="DRY: growth with each repeated token.")
    ] = 1.75
    dry_allowed_length: Annotated[
        int, _penalties("--dry-allowed-length", help="DRY: repetitions shorter than this are free.")
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        _penalties("--dry-penalty-last-n", help="DRY: how many tokens are searched; -1: all."),
    ] = 64
    dry_sequence_breakers: Annotated[
        list[str] | None,
        _penalties(
            "--dry-sequence-breaker",
            metavar="TEXT",
            help="DRY: no repetition reaches across it; can be repeated; none: no breakers.",
            show_default=r"\n : \" *",
        ),
    ] = None
    typical_p: Annotated[
        float,
        _more("--typical-p", "--typical", help="Keep tokens of typical surprise up to p; 1: off."),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        _more(
            "--top-n-sigma",
            "--top-nsigma",
            help="Keep logits within n deviations of the best; 0: off.",
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float, _more("--xtc-probability", help="XTC: how often top choices are excluded; 0: off.")
    ] = 0.0
    xtc_threshold: Annotated[
        float, _more("--xtc-threshold", help="XTC: what a top choice is; over 0.5: off.")
    ] = 0.1
    min_keep: Annotated[
        int, _more("--min-keep", help="Tokens that top-p, min-p, typical-p and XTC leave.")
    ] = 0
    dynatemp_range: Annotated[
        float,
        _more("--dynatemp-range", help="Let the temperature vary by this, with entropy; 0: off."),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, _more("--dynatemp-exp", help="How entropy becomes a temperature.")
    ] = 1.0
    mirostat: Annotated[
        int, _more("--mirostat", help="1 or 2: hold the surprise, without other samplers; 0: off.")
    ] = 0
    mirostat_tau: Annotated[
        float, _more("--mirostat-ent", help="Mirostat: target surprise in bits.")
    ] = 5.0
    mirostat_eta: Annotated[float, _more("--mirostat-lr", help="Mirostat: learning rate.")] = 0.1
    adaptive_target: Annotated[
        float,
        _more("--adaptive-target", help="Adaptive-p: prefer this probability; negative: off."),
    ] = -1.0
    adaptive_decay: Annotated[
        float, _more("--adaptive-decay", help="Adaptive-p: how long chosen tokens count.")
    ] = 0.9
    samplers: Annotated[
        str | None,
        _more(
            "--samplers",
            metavar="NAMES",
            help="Samplers and their order, such as 'top_k;temperature'.",
            show_default="all",
        ),
    ] = None

    def checked(self) -> SamplerOptions:
        """Return the sampler's options.

        Raises:
            OptionError: a value outside its range.
        """
        from kvcellar.text.sampler import SamplerOptions

        given: dict[str, Any] = asdict(self)
        given["seed"] = None if self.seed == -1 else self.seed
        given["logit_bias"] = dict(map(_parse_bias, self.logit_bias or ()))
        if self.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = _parse_breakers(self.dry_sequence_breakers)
        if self.samplers is not None:
            given["samplers"] = _parse_samplers(self.samplers)
        return SamplerOptions(**{name: one for name, one in given.items() if one is not None})


def _parse_bias(text: str) -> tuple[int, float]:
    """Return token and bias of ``ID=VALUE`` or llama.cpp's ``ID+VALUE`` and ``ID-VALUE``."""
    found = re.fullmatch(r"(\d{1,10})(?:=|(?=[+-]))([+-]?[\w.]+)", text, re.ASCII)
    try:
        return int(found[1]), float(found[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise OptionError(
            f"--logit-bias {shown(text)}: must be ID=VALUE, such as 15043=1.5 or 2=-inf"
        ) from None


def _parse_breakers(texts: list[str]) -> list[str]:
    r"""Return the breakers, with \\n and \\t spelled out as a shell has them; ``none`` is none."""
    spelled = [text.replace(r"\n", "\n").replace(r"\t", "\t") for text in texts]
    return [] if texts == ["none"] else spelled


def _parse_samplers(names: str) -> list[str]:
    """Return the samplers of ``a;b;c``; dashes and llama.cpp's other names are understood."""
    from kvcellar.text.sampler import SAMPLERS

    known = {name.replace("_", ""): name for name in SAMPLERS}
    known |= {"temp": "temperature", "typ": "typ_p", "typical": "typ_p", "typicalp": "typ_p"}
    known["nucleus"] = "top_p"
    given = [name.strip().lower() for name in names.split(";")]
    return [known.get(re.sub("[-_]", "", name), name) for name in given if name]


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
        _computing(
            "--threads", "-t", help="Number of compute threads.", show_default="all processors"
        ),
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
        ignore_eos: the model's own stop tokens are never drawn.

    Raises:
        OptionError: ``max_tokens`` is out of range.
    """

    max_tokens: int
    stop: list[str] | None
    sampling: SamplerOptions
    grammar: Grammar | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not -1 <= self.max_tokens <= _MOST_TOKENS:
            allowed = f"-1 (no limit) or in [0, {_MOST_TOKENS}]"
            raise OptionError(f"--max-tokens (-n) must be {allowed}, found {self.max_tokens}")

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None: no limit."""
        return None if self.max_tokens == -1 else self.max_tokens

    def sampler(self, tokenizer: Tokenizer) -> Sampler:
        """Return what chooses the tokens of an answer; its seed is known from here on.

        Raises:
            GrammarError: the grammar is wrong, or cannot be followed.
        """
        from kvcellar.text.sampler import Sampler

        return Sampler(
            self.sampling,
            constraint=None if self.grammar is None else self.grammar.matcher(tokenizer),
            tokenizer=tokenizer if tokenizer.has_text else None,
        )

    def stream(self, sequence: Sequence, sampler: Sampler) -> Iterator[str]:
        """Generate what follows a sequence, piece by piece, with what :meth:`sampler` returned.

        Raises:
            CacheFull: no cell is left.
            GrammarError: the grammar cannot be followed.
        """
        return self.hinted(
            sequence.stream(self.limit, sampler=sampler, stop=self.stop, ignore_eos=self.ignore_eos)
        )

    def hinted(self, pieces: Iterator[str]) -> Iterator[str]:
        """Yield what comes; a full cache is told with the option that helps."""
        try:
            yield from pieces
        except CacheFull as error:
            raise CacheFull(error.needed, error.free, "use a larger --n-ctx") from error
