"""Messages as clients send them, made into those that a template takes.

Clients of OpenAI's API send ``content: null``, lists of text parts, arguments of tool calls as JSON
text, and a system message to every model. Templates are written for one or the other, and often
fail, or leave something out, on the rest. What a template takes is found as llama.cpp finds it: by
rendering messages with a needle, and looking for it in the result. That is only done for messages
of which it matters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from kvcellar.errors import TemplateError
from kvcellar.text.chat_template import ChatTemplate, Message, check_messages
from kvcellar.text.vocab import describe

_NEEDLE = "needle-7f3a"
_KEYS = (f'"{_NEEDLE}":', f"'{_NEEDLE}':")


class Dialect:
    """Find which forms of messages a template accepts.

    Args:
        template: which.
        variables: further names for it, such as ``enable_thinking``.
    """

    def __init__(self, template: ChatTemplate, variables: Mapping[str, Any]) -> None:
        self._template = template
        self._variables = variables

    @cached_property
    def takes_system(self) -> bool:
        """Whether it shows a system message."""
        system = {"role": "system", "content": _NEEDLE}
        return _NEEDLE in self._rendered(system, {"role": "user", "content": "a"})

    @cached_property
    def takes_text(self) -> bool:
        """Whether it shows content that is a string."""
        return _NEEDLE in self._rendered({"role": "user", "content": _NEEDLE})

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it shows content that is a list of parts, and as text, not as data."""
        parts = [{"type": "text", "text": _NEEDLE}]
        shown = self._rendered({"role": "user", "content": parts})
        return _NEEDLE in shown and "'type'" not in shown and '"type"' not in shown

    @cached_property
    def call(self) -> tuple[bool, bool]:
        """How it shows tool calls: arguments as a mapping, and content as "" rather than None."""
        for as_mapping, as_text in product((True, False), (True, False)):
            arguments: object = {_NEEDLE: "print('Hello')"}
            function = {
                "name": "tool",
                "arguments": arguments if as_mapping else json.dumps(arguments),
            }
            message = {
                "role": "assistant",
                "content": "" if as_text else None,
                "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
            }
            shown = self._rendered({"role": "user", "content": "a"}, message)
            if any(key in shown for key in _KEYS):
                return as_mapping, as_text
        return True, True

    def _rendered(self, *messages: Message) -> str:
        try:
            return self._template.render_with(
                messages, self._variables, add_generation_prompt=False
            )
        except TemplateError:
            return ""


def normalize(messages: Sequence[Message], dialect: Dialect) -> list[dict[str, Any]]:
    """Return messages that say the same in the way that a template takes.

    Arguments of tool calls are mappings if it takes them; missing content is "", and text parts are
    joined by line breaks if it takes no parts; a system message becomes the beginning of the first
    user message if the template shows none; keys without a value are left out.

    Raises:
        TemplateError: a message is malformed; names it.
    """
    check_messages(messages)
    result = [_cleaned(message, f"messages[{i}]", dialect) for i, message in enumerate(messages)]
    if any(message["role"] == "system" for message in result) and not dialect.takes_system:
        return _without_system(result)
    return result


def _cleaned(message: Message, name: str, dialect: Dialect) -> dict[str, Any]:
    cleaned = {key: value for key, value in message.items() if value is not None}
    if not cleaned.get("tool_calls", True):
        del cleaned["tool_calls"]
    cleaned["content"] = _content(cleaned.get("content", ""), f"{name}.content", dialect)
    if "tool_calls" in cleaned:
        as_mapping, as_text = dialect.call
        calls = cleaned["tool_calls"]
        cleaned["tool_calls"] = _calls(calls, f"{name}.tool_calls", as_mapping)
        if not as_text and not cleaned["content"]:
            cleaned["content"] = None
    return cleaned


def _content(content: object, name: str, dialect: Dialect) -> object:
    if isinstance(content, str):
        if _needs_parts(content, dialect):
            return [{"type": "text", "text": content}]
        return content
    if not isinstance(content, Sequence):
        raise TemplateError(f"{name} must be text or a list of parts, found {describe(content)}")
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise TemplateError(
                f'{name}[{i}] must be a mapping with "type", found {describe(part)}'
            )
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise TemplateError(f'{name}[{i}] needs "text", a string')
    if any(part["type"] != "text" for part in content) or dialect.takes_parts:
        return [dict(part) for part in content]
    return "\n".join(part["text"] for part in content)


def _needs_parts(content: str, dialect: Dialect) -> bool:
    """Return whether text has to be put into a part to be shown at all."""
    return bool(content) and not dialect.takes_text and dialect.takes_parts


def _calls(calls: object, name: str, as_mapping: bool) -> list[dict[str, Any]]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise TemplateError(f"{name} must be a list of calls, found {describe(calls)}")
    result = []
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise TemplateError(f"{name}[{i}] must be a mapping, found {describe(call)}")
        function = call.get("function")
        if isinstance(function, Mapping) and "arguments" in function:
            arguments = _arguments(function["arguments"], as_mapping)
            result.append({**call, "function": {**function, "arguments": arguments}})
        else:
            result.append(dict(call))
    return result


def _arguments(arguments: Any, as_mapping: bool) -> Any:
    """Return the arguments of a call as a mapping or as JSON; what is neither stays as it is."""
    if as_mapping and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    if not as_mapping and isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put what system messages say before the text of the user message that follows them."""
    result: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(_text_of(message["content"]))
            continue
        if waiting and message["role"] == "user":
            message = {**message, "content": _after("\n".join(waiting), message["content"])}
            waiting = []
        result.append(message)
    if waiting:
        result.append({"role": "user", "content": "\n".join(waiting)})
    return result


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or ())


def _after(system: str, content: Any) -> Any:
    if isinstance(content, str):
        return f"{system}\n{content}" if content else system
    return [{"type": "text", "text": system}, *content]
