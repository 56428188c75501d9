"""Chat templates: what models expect of them, and what hostile ones try."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvcellar.errors import TemplateError
from kvcellar.text.chat_template import ChatTemplate
from kvcellar.text.tokenizer import Tokenizer

Maker = Callable[..., dict[str, object]]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "Hello"}]


def test_chatml() -> None:
    template = ChatTemplate(CHATML)
    prompt = "<|im_start|>user\nHello<|im_end|>\n"
    assert template.render(HELLO) == prompt + "<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == prompt


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ nothing }}{{ nothing is defined }}", "False"),
        ("{{ {'a': '<b> é'} | tojson }}", '{"a": "<b> é"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        (
            "{% for x in [1, 2] %}\n  {% if x == 1 %}\n  {{ x }}\n  {% endif %}\n{% endfor %}",
            "  1\n",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        (
            "{% set n = namespace(i=0) %}{% for m in [1] %}{% set n.i = 5 %}{% endfor %}{{ n.i }}",
            "5",
        ),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) ~ f('a') }}", "<1><a>"),
        ("{{ 'a-b'.split('-')[1] ~ 1 ~ ('%s %d' % ('x', 3)) ~ '{:03}'.format(7) }}", "b1x 3007"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ extra }}", "given"),
    ],
)
def test_templates_have_what_transformers_gives_them(source: str, expected: str) -> None:
    assert ChatTemplate(source, "<s>", "</s>").render(HELLO, extra="given") == expected


def test_tools_are_passed_on() -> None:
    template = ChatTemplate("{{ tools[0].function.name }}")
    assert template.render(HELLO, tools=[{"function": {"name": "add"}}]) == "add"


@pytest.mark.parametrize("source", [None, ""])
def test_no_template_is_told_with_a_remedy(source: str | None) -> None:
    with pytest.raises(TemplateError, match=r"no chat template: use a plain prompt"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("\n{% if %}", "line 2"),
        ("{{ 'open", "chat template, line 1"),
        ("{{ raise_exception('only users') }}", "refuses the messages: only users"),
        ("{{ nothing.attribute }}", "'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "failed"),
        ("{{ 1 // 0 }}", "failed"),
        ("{% include 'file' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ messages | tojson | nofilter }}", "nofilter"),
        ("(" * 10 + "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "does not compile"),
        ("x" * (2**20 + 1), "too long"),
    ],
)
def test_failures_are_template_errors(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source).render(HELLO)


@pytest.mark.parametrize(
    "messages",
    [
        "Hello",
        [1],
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        None,
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(TemplateError, match="messages"):
        ChatTemplate(CHATML).render(messages)


def test_tool_calls_need_no_content() -> None:
    calls: list[Mapping[str, Any]] = [{"role": "assistant", "tool_calls": []}]
    assert ChatTemplate("{{ messages | length }}").render(calls) == "1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (messages | tojson).__class__.mro() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ self._TemplateReference__context.environment.step() }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    messages = [dict(HELLO[0])]
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(messages)
    assert messages == HELLO


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{%set step=1%}{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x~n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x+n.x %}{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'x' * 10000 }}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 9999999 }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_templates_cannot_spend_without_end(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(HELLO)
    assert time.monotonic() - started < 10


def test_long_conversations_are_well_within_the_bounds() -> None:
    messages = HELLO * 5000
    assert ChatTemplate(CHATML).render(messages).count("Hello") == 5000


def test_templates_of_a_file_by_name(bpe: Maker) -> None:
    metadata = bpe((), (("<s>", 3),), bos_token_id=256)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}default"
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    tokenizer = Tokenizer.from_metadata(metadata)
    assert ChatTemplate.from_metadata(metadata, tokenizer).render(HELLO) == "<s>default"
    assert ChatTemplate.from_metadata(metadata, tokenizer, "tool_use").render(HELLO) == "tools"
    with pytest.raises(TemplateError, match="no chat template 'rag'; one of chatml, tool_use"):
        ChatTemplate.from_metadata(metadata, tokenizer, "rag")
    metadata["tokenizer.chat_template"] = 7
    with pytest.raises(TemplateError, match="must be a string"):
        ChatTemplate.from_metadata(metadata, tokenizer)


def test_smollm2_prompt(
    smollm2_metadata: Mapping[str, object], smollm2_tokenizer: Tokenizer
) -> None:
    template = ChatTemplate.from_metadata(smollm2_metadata, smollm2_tokenizer)
    prompt = template.render(HELLO)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2_tokenizer.encode(prompt, parse_special=True)
    assert ids.count(1) == 3
    assert ids.count(2) == 2
