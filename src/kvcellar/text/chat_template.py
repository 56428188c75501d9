"""Render chat messages to a prompt, with the Jinja template that comes with a model.

A template is code from a model file, which is not trusted: it runs in a sandbox with limits
(:mod:`kvcellar.text.template_sandbox`), and any failure is a ``TemplateError``. Templates see what
Hugging Face transformers gives them: ``messages``, ``tools``, ``documents``,
``add_generation_prompt``, ``bos_token``, ``eos_token``, ``raise_exception``, ``strftime_now``; an
undefined name prints as nothing, and using its parts is an error.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvcellar.errors import (
    TemplateError,
    check_bool,
    check_kind,
    check_text,
)
from kvcellar.text.tokenizer import Tokenizer
from kvcellar.text.vocab import Metadata, describe

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]

_KEY = "tokenizer.chat_template"
_MAX_SOURCE_CHARS = 2**16
_MAX_QUOTE = 160  # characters of a template's line in an error

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""The template of which most others are variants, for models that come without one."""

NAMED = MappingProxyType({"chatml": CHATML})
"""Templates that can be asked for by name, whatever model is used."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source; None or "" if the model has none.
        bos_token: the text of BOS, for templates that begin with it.
        eos_token: the text of EOS.

    Raises:
        TemplateError: there is no source, or it is malformed.
    """

    def __init__(
        self, source: str | None, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        if source is not None and not isinstance(source, str):
            raise TemplateError(f"a chat template must be a string, found {describe(source)}")
        if not source:
            raise TemplateError(
                "the model has no chat template: use a plain prompt, as kvcellar run --raw does, "
                "or another template, such as chatml"
            )
        if len(source) > _MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters: that is too long")
        self.source = source
        self._special = {
            name: "" if token is None else check_text(name, token)
            for name, token in (("bos_token", bos_token), ("eos_token", eos_token))
        }
        self._template = _compile(source)

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, ...]]:
        """Copy and pickle it as its source, which is compiled again."""
        return ChatTemplate, (self.source, *self._special.values())

    @classmethod
    def from_metadata(
        cls, metadata: Metadata, tokenizer: Tokenizer, name: str | None = None
    ) -> ChatTemplate:
        """Return the template of a GGUF file; ``name`` picks one of several.

        A name that the file does not have may be one of :data:`NAMED`.

        Raises:
            TemplateError: there is none, or none of that name; the message lists the names.
        """
        key = f"{_KEY}.{name}" if name else _KEY
        source = metadata.get(key)
        if name and source is None:
            known = sorted({*names_in(metadata), *NAMED})
            if name not in NAMED:
                raise TemplateError(f"no chat template {name!r}; one of {', '.join(known)}")
            source = NAMED[name]
        if source is not None and not isinstance(source, str):
            raise TemplateError(f"{key} must be a string, found {describe(source)}")
        return cls.for_tokenizer(source, tokenizer)

    @classmethod
    def for_tokenizer(cls, source: str | None, tokenizer: Tokenizer) -> ChatTemplate:
        """Return a template of a source, with BOS and EOS of a model's vocabulary."""
        tokens = check_kind("tokenizer", tokenizer, Tokenizer).vocab.tokens
        ids = (tokenizer.bos_id, tokenizer.eos_id)
        return cls(source, *(None if i is None else tokens[i] for i in ids))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for these messages.

        It spells special tokens, often BOS too: encode it with ``parse_special=True``, and without
        ``add_special`` if it begins with BOS.

        Args:
            messages: each with "role", and "content" or "tool_calls".
            add_generation_prompt: end with the beginning of the model's answer.
            tools: descriptions of functions, as JSON Schema, for templates that use them.
            **variables: further names for the template.

        Raises:
            TemplateError: a message is malformed, or the template fails.
        """
        return self.render_with(
            messages, {"tools": tools, **variables}, add_generation_prompt=add_generation_prompt
        )

    def render_with(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Do the same with no other names than these: ``tools`` is undefined if it is not given.

        Of 70 templates that models come with, three fail if ``tools`` is None, and none if it is
        undefined.
        """
        check_messages(messages)
        check_kind("variables", variables, dict)
        check_bool("add_generation_prompt", add_generation_prompt)
        values = {
            **self._special,
            "messages": messages,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return _run(self._template, self.source, values)


def names_in(metadata: Metadata) -> list[str]:
    """Return the names of the further templates that a GGUF file has, such as "tool_use"."""
    return sorted(key[len(_KEY) + 1 :] for key in metadata if key.startswith(_KEY + "."))


def read_template(path: Path) -> str:
    """Read the source of a template from a file.

    Raises:
        TemplateError: the file cannot be read, or is no text.
    """
    try:
        if not path.is_file() or path.stat().st_size > 4 * _MAX_SOURCE_CHARS:
            raise TemplateError(f"{path} is no template: give a file of Jinja source")
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TemplateError(f"cannot read the template {path}: {error}") from error


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    from jinja2 import TemplateSyntaxError

    from kvcellar.text.template_sandbox import TemplateEnvironment

    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment = TemplateEnvironment(functions)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise TemplateError(
            f"chat template, line {error.lineno}: {_cut(str(error.message))}"
        ) from error
    except Exception as error:  # nested too deep, for one
        raise TemplateError(f"the chat template does not compile: {_reason(error)}") from error


def _run(template: Template, source: str, values: Mapping[str, Any]) -> str:
    from kvcellar.text.template_meter import Meter

    try:
        context = template.new_context(dict(values))
        context.meter = Meter(*values.values())  # type: ignore[attr-defined]
        return "".join(template.root_render_func(context))
    except TemplateError as error:
        raise TemplateError(f"{error}{_where(template, source, error)}") from error.__cause__
    except Exception as error:  # a template can raise whatever Python can
        where = _where(template, source, error)
        raise TemplateError(f"the chat template failed: {_reason(error)}{where}") from error


def _where(template: Template, source: str, error: BaseException) -> str:
    """Name and quote the line of the template at which an error was raised."""
    number, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            number = template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    lines = source.splitlines()
    if not 0 < number <= len(lines):
        return ""
    line = lines[number - 1].strip()
    return f" (line {number}: {line if len(line) <= _MAX_QUOTE else line[:_MAX_QUOTE] + '...'})"


def _reason(error: BaseException) -> str:
    return _cut(str(error) or type(error).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."


def check_messages(messages: object) -> None:
    """Raise TemplateError unless these are messages, each with a role and something to say."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list of messages, found {describe(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TemplateError(f"messages[{i}] must be a mapping, found {describe(message)}")
        if not isinstance(message.get("role"), str):
            raise TemplateError(f'messages[{i}] needs "role", a string')
        if "content" not in message and "tool_calls" not in message:
            raise TemplateError(f'messages[{i}] needs "content" (or "tool_calls")')


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the chat template refuses the messages: {_cut(str(message))}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(str(form)[:256])
