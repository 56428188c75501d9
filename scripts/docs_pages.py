"""Pages of the API reference, made when the documentation is built.

As a hook of mkdocs it adds a page for each of :data:`PAGES`; a public name that is on none of them,
or on two, ends the build. As an extension of griffe it makes Markdown of what docstrings say in
reStructuredText: roles become links where their target has a page, and code where it has none.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from griffe import Alias, Extension, GriffeLoader, Module, NameResolutionError, Object
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import kvcellar

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page as MkDocsPage

PACKAGE = "kvcellar"
ERRORS = tuple(name for name in kvcellar.__all__ if name in vars(kvcellar.errors))
OTHERS = ("__version__", "errors")


class Page(NamedTuple):
    """A page of the reference: its file, its title, what it says first, and its names."""

    file: str
    title: str
    intro: str
    names: tuple[str, ...]

    def markdown(self) -> str:
        """The page, its entries yet to be filled from docstrings."""
        entries = [f"::: {PACKAGE}.{name}" for name in self.names]
        if self.names == ERRORS:  # the module's docstring draws their tree
            entries = [f"::: {PACKAGE}.errors\n    options:\n      show_root_heading: false"]
        return "\n\n".join((f"# {self.title}", self.intro, *entries))


PAGES = (
    Page(
        "model",
        "Models and contexts",
        "A model is a mapped GGUF file; a context is a cache for it, with the means to compute.",
        ("Model", "Context", "ContextOptions", "find_model"),
    ),
    Page(
        "sequence",
        "Sequences",
        "A sequence is a text in a context: append to it, fork, edit, generate, save.",
        (
            "Sequence",
            "generate_all",
            "stream_all",
            "Result",
            "Token",
            "SamplerOptions",
            "ContextShift",
        ),
    ),
    Page(
        "chat",
        "Chats",
        "A conversation over one sequence, and prompts of messages; [the guide](../chat.md) says "
        "what is done about text that spells control tokens.",
        ("Chat", "ChatPrompt"),
    ),
    Page(
        "cache",
        "The cache and its verbs",
        "`Context.cache` has llama.cpp's verbs under llama.cpp's names. The cache of a model whose "
        "layers all attend alike is an `AttentionCache`, which can be used without a model too.",
        ("AttentionCache", "Batch", "CacheSpec", "LayerSpec", "KVType"),
    ),
    Page(
        "prompts",
        "Prompts, stores and files",
        "Prompts that are computed once; [the guide](../prompt-cache.md) says how they are found.",
        ("PromptCache", "open_store", "save_llama_file"),
    ),
    Page(
        "grammars",
        "Grammars",
        "What a generated text may be; [the guide](../grammars.md) has the rules.",
        ("Grammar",),
    ),
    Page("errors", "Errors", "", ERRORS),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    _check_complete()
    for page in PAGES:
        files.append(File.generated(config, f"api/{page.file}.md", content=page.markdown()))
    return files


def on_page_markdown(markdown: str, page: MkDocsPage, **options: Any) -> str:
    """Append the pages of the reference to the front page."""
    del options
    if page.file.src_uri != "index.md":
        return markdown
    rows = (f"| [{p.title}](api/{p.file}.md) | {_listed(p.names)} |" for p in PAGES)
    return "\n".join((markdown, "## API", "", "| page | names |", "|---|---|", *rows))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"[`{name}`][{PACKAGE}.{name}]" for name in names)


def _check_complete() -> None:
    times = Counter(name for page in PAGES for name in page.names)
    times.update(OTHERS)
    wrong = [name for name in {*kvcellar.__all__, *times} if times[name] != 1]
    wrong += [name for name in times if name not in kvcellar.__all__]
    if wrong:
        raise PluginError(f"on no page of the reference, or on several: {', '.join(sorted(wrong))}")


class Roles(Extension):
    """Markdown in place of reStructuredText in all docstrings."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **options: Any) -> None:
        """Rewrite the docstrings of a package that was read."""
        del loader, options
        _rewrite(pkg)


def _rewrite(item: Object) -> None:
    if item.docstring is not None:
        item.docstring.value = _markdown(item.docstring.value, item)
    for member in item.members.values():
        if not isinstance(member, Alias):
            _rewrite(member)


def _markdown(text: str, item: Object) -> str:
    text = re.sub(r"^[ ]*::\n\n?", "", text, flags=re.MULTILINE)  # before an indented block
    text = re.sub(r"(?<=\w)::$", ":", text, flags=re.MULTILINE)
    return re.sub(r":[a-z]+:`(~?)([\w.]+)`", lambda found: _reference(item, *found.groups()), text)


def _reference(item: Object, tilde: str, name: str) -> str:
    shown = name.rpartition(".")[2] if tilde else name
    target = escape(_target(item, name))
    return f'<autoref identifier="{target}" optional hover><code>{escape(shown)}</code></autoref>'


def _target(item: Object, name: str) -> str:
    """The full name, as it is seen from an object; otherwise that of a public name."""
    if name.startswith(f"{PACKAGE}."):
        return name
    first, dot, rest = name.partition(".")
    try:
        return f"{item.resolve(first)}{dot}{rest}"
    except NameResolutionError:
        return f"{PACKAGE}.{name}"
