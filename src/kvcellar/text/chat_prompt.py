"""Messages to tokens: what a template writes may be a control token, what a message says may not.

Which characters of a rendered prompt come from which message is found by rendering twice: as it is,
and with every text between two *marks*, lone surrogates, which no text that can be tokenized
contains. Without its marks the second has to equal the first, or it is not believed. Marks stand
inside the white space around a text, so that templates can strip it, and behind a beginning that
the template asks for with ``startswith``. Of a text that a template cuts, one mark may be left, and
the text is followed from there; so each control token that a text spells has two marks of its own.

Answers that were sampled keep their tokens: text can often be spelled by other tokens than those
that were drawn, and then nothing behind them would be what the cache holds.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from kvcellar.errors import OptionError, TemplateError, check_bool, check_kind, shown
from kvcellar.text.chat_template import ChatTemplate, Message
from kvcellar.text.messages import Dialect, normalize
from kvcellar.text.tokenizer import Tokenizer

TEMPLATE = -1
"""In place of a message's number: the tokens are the template's, and belong to no message."""

_OPEN, _CLOSE, _DIGIT, _BASE = 0xD800, 0xDC00, 0xD900, 256
_SPELLED = "\ud801", "\udc01"
"""What stands before and behind a control token that a text spells."""
_MARK = re.compile("([\ud800\udc00])([\ud900-\ud9ff])([\ud900-\ud9ff])|([\ud801\udc01])")
_ESCAPED = re.compile(r"\\u(d80[01]|dc0[01]|d9[0-9a-f]{2})")
"""A mark as JSON in ASCII has it."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_TEXTS = _BASE**2
_MAX_TAIL = 64  # characters of white space that end a turn
_END_TEST = re.compile(
    r"""\.(startswith|endswith)\(\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")"""
)
_ALWAYS = frozenset({"content", "text", "reasoning_content", "reasoning", "thinking", "arguments"})
"""Keys below which every text is marked; elsewhere those that spell a token are: templates compare
roles, types and names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A message that was sampled.

    Attributes:
        ids: its tokens, without the one that ended it.
        gap: as :attr:`ChatPrompt.gap` of the prompt that it followed.
    """

    ids: tuple[int, ...]
    gap: int


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as tokens; iterating gives the ids, so it can be appended to a sequence.

    Attributes:
        text: what the template rendered.
        ids: the tokens.
        message_of: for each token the number of the message that it belongs to, with the role
            before it and the end of the turn behind it; :data:`TEMPLATE` for what begins the
            answer.
        gap: how many characters of ``text`` follow the text of the last message.
    """

    text: str = field(repr=False)
    ids: tuple[int, ...]
    message_of: tuple[int, ...] = field(repr=False)
    gap: int

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class Span(NamedTuple):
    """Characters ``[begin, end)`` of a rendered prompt, and the text of a message they are from.

    ``is_literal``: they are text, whatever they spell.
    """

    begin: int
    end: int
    text: MarkedText
    is_literal: bool = True


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text of a message, without the white space around it.

    Attributes:
        core: the text.
        message: the number of its message; :data:`TEMPLATE` for tools and variables.
        is_content: it is all that the message says.
        name: where it stands, for errors.
        n_before: how many of its first characters stand outside the marks.
        n_behind: how many of its last ones do.
    """

    core: str
    message: int
    is_content: bool
    name: str
    n_before: int
    n_behind: int

    def begin(self, text: str, mark: int) -> int:
        """Return where it begins in a prompt, from where its first mark was."""
        before = self.core[: self.n_before]
        return mark - self.n_before if text.endswith(before, 0, mark) else mark

    def end(self, text: str, mark: int) -> int:
        """Return where it ends in a prompt, from where its second mark was."""
        behind = self.core[len(self.core) - self.n_behind :]
        return mark + self.n_behind if text.startswith(behind, mark) else mark


_NOBODY = MarkedText("", TEMPLATE, False, "", 0, 0)


class _Unmarked(NamedTuple):
    """A prompt that was rendered with marks, without them.

    ``spans``: what was between marks of texts; ``spelled``: between those of spelled tokens;
    ``is_whole``: every text is there with both its marks.
    """

    text: str | None
    spans: list[Span]
    spelled: list[Span]
    is_whole: bool

    @property
    def all_spans(self) -> list[Span]:
        """Return both, in order."""
        return sorted([*self.spans, *self.spelled], key=lambda span: span[:2])


class ChatFormat:
    """A template and the vocabulary that its prompts are made of.

    Args:
        template: renders messages.
        tokenizer: the model's.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = check_kind("template", template, ChatTemplate)
        self.tokenizer = check_kind("tokenizer", tokenizer, Tokenizer)
        self._dialects: dict[str, Dialect] = {}

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special: bool = False,
        answers: Mapping[int, Answer] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Return the tokens of a conversation.

        Args:
            messages: as OpenAI's API has them; see :func:`~kvcellar.text.messages.normalize`.
            tools: descriptions of functions, for templates that show them.
            add_generation_prompt: end with the beginning of the model's answer.
            continue_final_message: end with the text of the last message, to be continued; then
                nothing else ends the prompt.
            parse_special: let texts of messages spell control tokens and user-defined ones. Who
                wrote them can then end a turn and begin another in anybody's name.
            answers: messages that were sampled, by their number; they keep their tokens wherever
                the template shows the whole text.
            variables: further names for the template, such as ``enable_thinking``.

        Raises:
            TemplateError: a message is malformed, the template fails, or it changes a text that
                spells a control token so that this could not be kept from being one.
            TokenizerError: a text cannot be tokenized.
        """
        parse_special = check_bool("parse_special", parse_special)
        open_end = check_bool("continue_final_message", continue_final_message)
        begins_answer = check_bool("add_generation_prompt", add_generation_prompt) and not open_end
        extra = _check_variables(variables)
        if checked := check_tools(tools):
            extra["tools"] = checked
        dialect = self._dialect(extra)
        cleaned = normalize(messages, dialect)
        numbers = _numbers(cleaned, messages)
        text, found = self._render(
            cleaned, numbers, begins_answer, extra, answers or {}, strict=not parse_special
        )
        literal = [] if parse_special else _ranges(found)
        spans = [span for span in found if span.text is not _NOBODY]
        if open_end:
            text = _cut_behind_last(text, spans, messages)
        pieces = _sampled(text, spans, answers or {}, messages)
        ids, owners = self._tokenize(text, spans, literal, pieces, begins_answer)
        gap = len(text) - (spans[-1].end if spans else 0)
        return ChatPrompt(text, tuple(ids), tuple(owners), gap)

    def _dialect(self, variables: Mapping[str, Any]) -> Dialect:
        key = repr(sorted(variables.items()))
        if key not in self._dialects:
            self._dialects = {key: Dialect(self.template, variables)}  # the last one, as it may be
        return self._dialects[key]

    # -- where texts are

    def _render(
        self,
        messages: list[dict[str, Any]],
        numbers: list[int],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        sampled: Collection[int],
        *,
        strict: bool,
    ) -> tuple[str, list[Span]]:
        """Render; return also which characters come from which text."""
        render = partial(self.template.render_with, add_generation_prompt=add_generation_prompt)
        text = render(messages, extra)
        if _SURROGATE.search(text):
            raise TemplateError("a message has a lone surrogate, which no text can contain")
        marker = _Marker(self.tokenizer, self.template.source, sampled)
        found = self._followed(marker, messages, numbers, render, extra)
        if found.text == text and found.is_whole:
            return text, found.all_spans
        spans = found.all_spans
        if found.text != text:
            spans = _search(text, marker.texts, self.tokenizer)
            if marker.n_spelled:
                fewer = _Marker(self.tokenizer, self.template.source, (), around=False)
                found = self._followed(fewer, messages, numbers, render, extra)
                if found.text == text:
                    spans = sorted([*spans, *found.spelled], key=lambda span: span[:2])
        if strict:
            self._check_no_more(text, spans, messages, render, extra)
        return text, spans

    def _followed(
        self,
        marker: _Marker,
        messages: list[dict[str, Any]],
        numbers: list[int],
        render: Callable[..., str],
        extra: Mapping[str, Any],
    ) -> _Unmarked:
        """Render with marks and take them out; the text is None if it cannot be rendered."""
        marked = [marker.message(m, i) for m, i in zip(messages, numbers, strict=True)]
        values = {key: marker.value(value, key, TEMPLATE) for key, value in extra.items()}
        try:
            return _unmark(render(marked, values), marker.texts)
        except TemplateError:
            return _Unmarked(None, [], [], is_whole=False)

    def _check_no_more(
        self,
        text: str,
        spans: Sequence[Span],
        messages: list[dict[str, Any]],
        render: Callable[..., str],
        extra: Mapping[str, Any],
    ) -> None:
        """Refuse a prompt that has more of a token than the template writes by itself."""
        tokenizer = self.tokenizer
        taken_out = {ord(char): "x" for char in tokenizer.first_characters()}
        harmless = [_translated(message, taken_out) for message in messages]
        own = render(harmless, _translated(extra, taken_out))
        n_own = Counter(own[begin:end] for begin, end in tokenizer.spelled_tokens(own))
        ranges = _ranges(spans)
        found = Counter(
            text[begin:end]
            for begin, end in tokenizer.spelled_tokens(text)
            if all(end <= first or begin >= last for first, last in ranges)
        )
        if more := found - n_own:
            raise TemplateError(
                f"a message spells {next(iter(more))!r}, a token of the model, and the template "
                "changes its text: take it out, or pass parse_special=True to keep it as one"
            )

    # -- tokens

    def _tokenize(
        self,
        text: str,
        spans: Sequence[Span],
        literal: list[tuple[int, int]],
        answers: list[tuple[int, int, int, tuple[int, ...]]],
        add_generation_prompt: bool,
    ) -> tuple[list[int], list[int]]:
        """Tokenize what stands between answers, which keep their tokens."""
        tokenizer = self.tokenizer
        owners_at = _Owners(text, spans, add_generation_prompt)
        ids: list[int] = []
        owners: list[int] = []
        done = 0
        last: list[int] = []
        for begin, end, message, sampled in [*answers, (len(text), len(text), TEMPLATE, ())]:
            ranges = [(max(b, done) - done, min(e, begin) - done) for b, e in literal]
            runs = tokenizer.encode_runs(
                text[done:begin],
                parse_special=True,
                continuing=tokenizer.ends_in_text(last),
                literal=[(b, e) for b, e in ranges if b < e],
            )
            for run in runs:
                is_whole = len(run.ids) == 1 and tokenizer.is_matched_whole(run.ids[0])
                ends = done + run.end if is_whole else None
                owner = owners_at(done + run.begin, ends)
                if owners_at.is_one(done + run.begin, done + run.end):
                    owners += [owner] * len(run.ids)
                else:
                    places = self._places(text[done:begin], run)
                    owners += [owners_at(done + place, ends) for place in places]
                ids += run.ids
            ids += sampled
            owners += [message] * len(sampled)
            owners_at.passed(end)
            last, done = ids[-1:], end
        bos = tokenizer.bos_id
        if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:  # the template may write it
            return [bos, *ids], [owners_at.first, *owners]
        return ids, owners

    def _places(self, text: str, run: Any) -> list[int]:
        """Return about where in a text each token of a run begins, by the bytes that it stands for.

        Vocabularies that normalize text, or put a space before it, have other bytes: these places
        are scaled.
        """
        part, pieces = text[run.begin : run.end], self.tokenizer.pieces
        sizes = [len(pieces[token]) for token in run.ids]
        starts = list(accumulate(sizes, initial=0))
        scale = len(part.encode()) / (starts[-1] or 1)
        last = len(part) - 1
        if part.isascii():
            return [run.begin + min(int(start * scale), last) for start in starts[:-1]]
        ends = list(accumulate(len(char.encode()) for char in part))
        return [run.begin + min(bisect_right(ends, start * scale), last) for start in starts[:-1]]


class _Owners:
    """Which message each place of a prompt belongs to, asked for in order.

    What stands between the texts of two messages ends the first one's turn up to the first token
    that is matched whole and the white space behind it; the rest begins the second one's.
    """

    def __init__(self, text: str, spans: Sequence[Span], add_generation_prompt: bool) -> None:
        self._text = text
        self._spans = [span for span in spans if span.text.message != TEMPLATE]
        self._i = 0
        self._tail: int | None = None  # where a turn ends that has ended
        self._last = TEMPLATE if add_generation_prompt else self._message(len(self._spans) - 1)

    @property
    def first(self) -> int:
        """The message that the prompt begins with."""
        return self._message(0)

    def __call__(self, place: int, whole_end: int | None) -> int:
        """Return the message of the token at a place, which ends there if it is matched whole."""
        self.passed(place)
        if self._i < len(self._spans) and self._spans[self._i].begin <= place:
            return self._message(self._i)
        if self._i and self._tail is None and whole_end is not None:
            rest = self._text[whole_end : whole_end + _MAX_TAIL]
            self._tail = whole_end + len(rest) - len(rest.lstrip())
        if self._i and (self._tail is None or place < self._tail):
            return self._message(self._i - 1)
        return self._message(self._i) if self._i < len(self._spans) else self._last

    def is_one(self, begin: int, end: int) -> bool:
        """Whether text that begins at the place asked for last belongs to one message up to an end.

        No token within is matched whole.
        """
        spans, i, tail = self._spans, self._i, self._tail
        is_behind_tail = tail is not None and tail <= begin
        if i < len(spans) and (i == 0 or is_behind_tail or spans[i].begin <= begin):
            i += 1  # within that text or before it; up to the next one all is its message's
        elif tail is not None:
            return is_behind_tail or end <= tail
        return i == len(spans) or end <= spans[i].begin

    def passed(self, place: int) -> None:
        """Leave behind the texts that end before a place."""
        while self._i < len(self._spans) and self._spans[self._i].end <= place:
            self._i += 1
            self._tail = None

    def _message(self, i: int) -> int:
        return self._spans[i].text.message if 0 <= i < len(self._spans) else TEMPLATE


class _Marker:
    """Puts marks around texts; remembers which."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        sampled: Collection[int],
        *,
        around: bool = True,
    ) -> None:
        self._sampled = sampled if around else ()
        self.texts: list[MarkedText] = []
        self.n_spelled = 0
        self._around = around
        self._tokenizer = tokenizer
        tests = [(kind, a or b) for kind, a, b in _END_TEST.findall(source)]
        self._beginnings = [_unescaped(text) for kind, text in tests if kind == "startswith"]
        self._ends = [_unescaped(text) for kind, text in tests if kind == "endswith"]

    def message(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return a message with marks."""
        marked: dict[str, Any] = self.value(message, f"messages[{number}]", number)
        return marked

    def value(self, value: Any, name: str, number: int, key: str = "") -> Any:
        """Return a value with marks in all the texts within."""
        if isinstance(value, str):
            return self._marked(value, name, number, key)
        if isinstance(value, Mapping):
            return {
                self._marked(k, name, number, ""): self.value(
                    v, f"{name}.{k}", number, key if key == "arguments" else k
                )
                for k, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(v, f"{name}[{i}]", number, key) for i, v in enumerate(value)]
        return value

    def _marked(self, text: Any, name: str, number: int, key: str) -> Any:
        if not isinstance(text, str):
            return text
        is_content = name == f"messages[{number}].content"
        core = text.strip()
        if not core and not (is_content and number in self._sampled):
            return text
        is_said = number != TEMPLATE and key in _ALWAYS
        if not is_said and not self._tokenizer.spelled_tokens(core):
            return text
        if len(self.texts) == _MAX_TEXTS:
            raise TemplateError(f"the messages have over {_MAX_TEXTS} texts")
        digits = "".join(chr(_DIGIT + d) for d in divmod(len(self.texts), _BASE))
        n_before = max((len(b) for b in self._beginnings if core.startswith(b)), default=0)
        n_behind = max((len(e) for e in self._ends if core.endswith(e)), default=0)
        if n_before + n_behind >= len(core):
            n_before = n_behind = 0
        self.texts.append(MarkedText(core, number, is_content, name, n_before, n_behind))
        first = text.index(core) if core else len(text)
        begin, end = first + n_before, first + len(core) - n_behind
        opened, closed = chr(_OPEN) + digits, chr(_CLOSE) + digits
        if not self._around:
            opened = closed = ""
        return f"{text[:begin]}{opened}{self._with_spelled(text[begin:end])}{closed}{text[end:]}"

    def _with_spelled(self, text: str) -> str:
        """Put marks around what spells a token, and the white space around that."""
        parts, done = [], 0
        for begin, end in self._tokenizer.spelled_tokens(text):
            begin = max(done, len(text[:begin].rstrip()))
            end = len(text) - len(text[end:].lstrip())
            parts += [text[done:begin], _SPELLED[0], text[begin:end], _SPELLED[1]]
            done = end
            self.n_spelled += 1
        return "".join([*parts, text[done:]])


def _translated(value: Any, table: Mapping[int, str]) -> Any:
    """Return a value with characters replaced in all texts within."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_translated(k, table): _translated(v, table) for k, v in value.items()}
    return [_translated(v, table) for v in value] if isinstance(value, list) else value


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\'", "'").replace('\\"', '"').replace("\\\\", "\\")


def _numbers(cleaned: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[int]:
    """Return which message each of the normalized ones was; merged system messages are left out."""
    if len(cleaned) == len(messages):
        return list(range(len(messages)))
    left = [i for i, message in enumerate(messages) if message["role"] != "system"]
    return [*left, *[len(messages) - 1] * (len(cleaned) - len(left))]


def _unmark(marked: str, texts: Sequence[MarkedText]) -> _Unmarked:
    """Take the marks out of a rendered prompt."""
    parts: list[str] = []
    events: list[tuple[int, bool, int]] = []  # place, opens, number of the text
    spelled: list[Span] = []
    opened = -1
    done = at = 0
    marked = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), marked)
    for match in _MARK.finditer(marked):
        parts.append(marked[done : match.start()])
        at += len(parts[-1])
        done = match.end()
        if match[4] is None:
            number = (ord(match[2]) - _DIGIT) * _BASE + ord(match[3]) - _DIGIT
            if number < len(texts):
                events.append((at, ord(match[1]) == _OPEN, number))
        elif match[4] == _SPELLED[0]:
            opened = at
        elif opened >= 0:
            spelled.append(Span(opened, at, _NOBODY))
            opened = -1
    text = "".join([*parts, marked[done:]])
    pairs = zip(events[::2], events[1::2], strict=False)
    is_paired = all(a[1:] == (True, b[2]) and not b[1] for a, b in pairs) and len(events) % 2 == 0
    is_whole = is_paired and len({number for _, _, number in events}) == len(texts)
    return _Unmarked(text, _between(text, texts, events), spelled, is_whole)


def _between(
    text: str, texts: Sequence[MarkedText], events: list[tuple[int, bool, int]]
) -> list[Span]:
    """Return what pairs of marks enclose, and what is left of a text that has lost one of them."""
    spans: list[Span] = []
    i = floor = 0
    while i < len(events):
        at, opens, number = events[i]
        one = texts[number]
        i += 1
        if not opens:
            end = one.end(text, at)
            begin = end - _common(text[floor:end][::-1], one.core[::-1])
        else:
            begin = one.begin(text, at)
            if i < len(events) and events[i][1:] == (False, number):
                end = one.end(text, events[i][0])
                i += 1
            else:
                ceiling = events[i][0] if i < len(events) else len(text)
                end = begin + _common(text[begin:ceiling], one.core)
        if begin < end or not one.core:
            spans.append(Span(begin, end, one))
        floor = end
    return spans


def _common(a: str, b: str) -> int:
    """Return how many characters two texts begin with alike."""
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return n


def _search(text: str, texts: Sequence[MarkedText], tokenizer: Tokenizer) -> list[Span]:
    """Find texts in a prompt whose template looks at more than their beginnings and ends.

    One that spells a token is found wherever it stands, of others the next place is taken.
    """
    spans: list[Span] = []
    at = 0
    for one in texts:
        spells = bool(tokenizer.spelled_tokens(one.core))
        place = text.find(one.core, 0 if spells else at) if one.core else -1
        while place >= 0:
            at = place + len(one.core)
            spans.append(Span(place, at, one, spells))
            place = text.find(one.core, at) if spells else -1
    return sorted(spans, key=lambda span: (span.begin, span.end))


def _ranges(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the characters that are literal, as ascending ranges."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(span[:2] for span in spans if span.is_literal):
        if ranges and begin < ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((begin, end))
    return ranges


def check_tools(tools: object) -> list[Mapping[str, Any]]:
    """Return descriptions of functions as a list.

    Raises:
        OptionError: they are none.
    """
    if tools is None:
        return []
    if not isinstance(tools, list | tuple) or not all(isinstance(one, Mapping) for one in tools):
        raise OptionError(f"tools={shown(tools)}: give a list of mappings, one a function")
    return list(tools)


def _check_variables(variables: object) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise OptionError(f"variables={shown(variables)}: give a mapping of names to values")
    return dict(variables)


def _cut_behind_last(text: str, spans: Sequence[Span], messages: Sequence[Message]) -> str:
    """Return a prompt up to the end of the last message's text."""
    last = len(messages) - 1
    if not spans or spans[-1].text.message != last:
        raise TemplateError(
            f"messages[{last}] cannot be continued: the chat template does not show its text last"
        )
    content = messages[last].get("content")
    trail = content[len(content.rstrip()) :] if isinstance(content, str) else ""
    end = spans[-1].end
    return text[: end + _common(text[end:], trail)]


def _sampled(
    text: str,
    spans: Sequence[Span],
    answers: Mapping[int, Answer],
    messages: Sequence[Message],
) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """Return where sampled answers stand that are shown whole, with the space they began with."""
    places: dict[int, list[int]] = {}
    for i, span in enumerate(spans):
        if span.text.message in answers:
            places.setdefault(span.text.message, []).append(i)
    result = []
    for number, found in places.items():
        span = spans[found[0]]
        content = messages[number]["content"]
        is_whole = isinstance(content, str) and text[span.begin : span.end] == content.strip()
        if len(found) > 1 or not span.text.is_content or not is_whole:
            continue
        answer, before = answers[number], spans[found[0] - 1].end if found[0] else 0
        begin, trail = before + answer.gap, content[len(content.rstrip()) :]
        if not before <= begin <= span.begin or text[begin : span.begin].strip():
            lead = content[: len(content) - len(content.lstrip())]
            begin = span.begin - (len(lead) if text[: span.begin].endswith(lead) else 0)
        end = span.end + _common(text[span.end :], trail)
        result.append((max(begin, before), end, number, answer.ids))
    return sorted(result)
