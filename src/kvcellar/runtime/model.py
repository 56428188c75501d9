"""A GGUF model: its weights mapped into memory, its tokenizer, and the contexts made of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from collections.abc import Sequence as List
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import numpy as np

from kvcellar.backends.base import ModelFile, OpenMemory
from kvcellar.errors import (
    ClosedError,
    ModelFileError,
    OptionError,
    TemplateError,
    check_bool,
    check_choice,
    check_kind,
    check_path,
    not_copied,
    shown,
)
from kvcellar.files import FileStamp
from kvcellar.models.blocks import Decoder, ModelSpec
from kvcellar.models.registry import load_architecture
from kvcellar.runtime.context import Context
from kvcellar.runtime.options import ContextOptions
from kvcellar.runtime.weights_hash import weights_hash
from kvcellar.text.chat_prompt import ChatFormat, ChatPrompt, check_tools
from kvcellar.text.chat_template import ChatTemplate, Message, names_in, read_template
from kvcellar.text.tokenizer import Tokenizer, check_pre
from kvcellar.types import ByteArray, CacheSpec, KVType, MemorySpec, RowFormat

BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "ggml": "kvcellar.backends.ggml.model_file:GgmlModelFile",
        "numpy": "kvcellar.backends.numpy.model_file:NumpyModelFile",
    }
)
"""Name to ``module:class``; modules are imported when needed."""


class Model:
    """A loaded model. Weights are mapped from the file, so loading costs little.

    While the model is open, do not write to its file or make it shorter: what is mapped changes
    with it, and reading what is gone ends the process (SIGBUS). Replace it by renaming another.

    Memory is given back by :meth:`close`, at the end of a ``with`` block, or with the last
    reference; that holds for contexts too. Views of the file's bytes keep it mapped.

    Args:
        path: a GGUF file.
        n_threads: how many threads compute; all available processors when None.
        backend: "ggml", or "numpy", which is slow and obvious and needs ``kvcellar[numpy]``.
        pre: the pre-tokenizer, in place of the one that the file names; for files that name one
            which is not known, or none, or a wrong one.

    Attributes:
        path: the file.
        metadata: what it says about the model.
        spec: architecture, sizes and layers.
        weight_bytes: bytes of its tensors.
        backend: the backend's name.

    Raises:
        ModelFileError: the file is missing, truncated, damaged or not GGUF.
        UnsupportedModel: it needs an architecture, tensor type or setting that is not supported.
        LibraryError: the backend's library cannot be used.
        OptionError: ``n_threads`` is outside its range, or no such backend or pre-tokenizer.
    """

    __reduce_ex__ = not_copied(
        "a Model", "open its path again with Model.from_gguf(); the file is mapped once"
    )

    def __init__(
        self,
        path: str | Path,
        *,
        n_threads: int | None = None,
        backend: str = "ggml",
        pre: str | None = None,
    ) -> None:
        if pre is not None:
            check_pre(pre)
        self._pre = pre
        self._file = open_model_file(check_path("path", path), backend, n_threads)
        self.path = self._file.path
        self.metadata: Mapping[str, object] = self._file.metadata
        self.backend = backend
        try:
            architecture = load_architecture(self.metadata, self._file.weights)
        except BaseException:
            self._file.close()
            raise
        self._architecture: Decoder[Any] | None = architecture  # None: closed
        self.spec: ModelSpec = architecture.spec
        self.weight_bytes = self._file.weight_bytes
        self._contexts: WeakSet[Context] = WeakSet()
        self._chat_formats: dict[object, ChatFormat] = {}

    @classmethod
    def from_gguf(
        cls,
        path: str | Path,
        *,
        n_threads: int | None = None,
        backend: str = "ggml",
        pre: str | None = None,
    ) -> Model:
        """Load a GGUF file; see the class for arguments and errors."""
        return cls(path, n_threads=n_threads, backend=backend, pre=pre)

    @property
    def architecture(self) -> Decoder[Any]:
        """What computes with its weights.

        Raises:
            ClosedError: the model is closed.
        """
        if self._architecture is None:
            raise ClosedError(f"the model {self.path.name} is closed")
        return self._architecture

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, built at first use.

        Raises:
            TokenizerError: its vocabulary cannot be built.
            UnsupportedModel: an unknown kind of vocabulary or pre-tokenizer.
            OptionError: ``pre`` was given for a kind of vocabulary that has no pre-tokenizer.
        """
        return Tokenizer.from_metadata(self.metadata, pre=self._pre)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template.

        Raises:
            TemplateError: the file has none.
        """
        return ChatTemplate.from_metadata(self.metadata, self.tokenizer)

    def chat_format(
        self, template: str | Path | ChatTemplate | None = None, *, has_tools: bool = False
    ) -> ChatFormat:
        """Return what makes prompts of messages.

        Args:
            template: another template than the file's: a name that the file has, or "chatml"; Jinja
                source, which has a brace or several lines; a path to a file of it; or a template.
            has_tools: whether tools will be shown: some files have a template for that.

        Raises:
            TemplateError: there is no such template, or it does not compile.
            TokenizerError: the vocabulary cannot be built.
        """
        has_tools = check_bool("has_tools", has_tools)
        if template is None and has_tools and "tool_use" in names_in(self.metadata):
            template = "tool_use"
        is_kept = template is None or isinstance(template, str | ChatTemplate)  # a file may change
        if is_kept and (known := self._chat_formats.get(template)) is not None:
            return known
        made = ChatFormat(self._find_template(template), self.tokenizer)
        if is_kept:
            self._chat_formats[template] = made
        return made

    def _find_template(self, template: object) -> ChatTemplate:
        if template is None:
            return self.chat_template
        if isinstance(template, ChatTemplate):
            return template
        if isinstance(template, Path):
            return ChatTemplate.for_tokenizer(read_template(template), self.tokenizer)
        if not isinstance(template, str):
            raise TemplateError(f"template={shown(template)}: give a name, Jinja source or a Path")
        if "{" in template or "\n" in template:
            return ChatTemplate.for_tokenizer(template, self.tokenizer)
        return ChatTemplate.from_metadata(self.metadata, self.tokenizer, template)

    def chat(
        self,
        messages: List[Message],
        *,
        tools: List[Mapping[str, Any]] | None = None,
        template: str | Path | ChatTemplate | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special: bool = False,
        **variables: Any,
    ) -> ChatPrompt:
        """Return the tokens of a conversation; append them to a sequence to go on with it.

        ::

            prompt = model.chat([{"role": "user", "content": "Hello"}])
            print(model.context().sequence().append(prompt).generate())

        Messages are those of OpenAI's API, made into what the template takes. What they say is
        text, also where it spells a control token.

        Args:
            messages: each with "role", and "content" or "tool_calls".
            tools: descriptions of functions.
            template: another than the file's; see :meth:`chat_format`.
            add_generation_prompt: end with the beginning of the model's answer.
            continue_final_message: end with the text of the last message instead.
            parse_special: let messages spell control tokens, and so end turns.
            **variables: further names for the template, such as ``enable_thinking=False``.

        Raises:
            TemplateError: the model has no template, or it refuses the messages.
            TokenizerError: the model has no tokenizer.
        """
        return self.chat_format(template, has_tools=bool(check_tools(tools))).prompt(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            parse_special=parse_special,
            variables=variables,
        )

    def context(
        self,
        *,
        n_ctx: int | None = None,
        n_seq_max: int = 8,
        n_ubatch: int = 512,
        type_k: str | KVType = KVType.F16,
        type_v: str | KVType = KVType.F16,
        flash_attn: bool | None = None,
        kernel: bool | None = None,
        defrag_threshold: float | None = None,
        swa_full: bool = False,
        checkpoints: int = 32,
        checkpoint_bytes: int | None = None,
    ) -> Context:
        """Make a cache and the graphs over it; see :class:`ContextOptions` for the arguments.

        Warns (``UserWarning``) of more cells than the positions that the model was trained for.

        Raises:
            OptionError: an argument outside its range, or a type that does not fit the heads.
            AllocationError: the K/V buffer cannot be had.
            ModelFileError: the model's file was truncated since it was opened.
        """
        _ = self.architecture
        self._check_whole()
        options = ContextOptions(
            n_ctx,
            n_seq_max,
            n_ubatch,
            type_k,
            type_v,
            flash_attn,
            kernel,
            defrag_threshold,
            swa_full,
            checkpoints,
            checkpoint_bytes,
        )
        trained = self.spec.n_ctx_train
        if n_ctx is not None and options.n_cells(self.spec) > trained:
            warnings.warn(
                f"n_ctx={options.n_ctx}: {self.path.name} was trained for {trained} positions; "
                "sequences longer than that lose sense (several shorter ones are fine)",
                stacklevel=2,
            )
        context = Context(self, options)
        self._contexts.add(context)
        return context

    def why_no_kernel(self, spec: CacheSpec) -> str | None:
        """Return why attention cannot run in a kernel of our own; None if it can."""
        return self._file.why_no_kernel(check_kind("spec", spec, CacheSpec))

    @cached_property
    def weights_hash(self) -> str:
        """A hash of all that is computed with, by which snapshots and stores know the model.

        Of a new file all is read once; then the hash is kept in the user's cache folder, and read
        from there once samples of the file confirm it. Nothing is written beside the model. See
        :mod:`kvcellar.runtime.weights_hash`.

        Raises:
            ClosedError: the model is closed, and it was not computed before.
            ModelFileError: the file was truncated since it was opened.
        """
        _ = self.architecture
        self._check_whole()
        return weights_hash(self._file)

    def convert_rows(self, rows: ByteArray, src: RowFormat, dst: RowFormat) -> ByteArray:
        """Convert rows of K or V ``[n, row_bytes]`` to another format, for snapshots."""
        if check_kind("rows", rows, np.ndarray).ndim != 2 or rows.dtype != np.uint8:
            raise OptionError(f"rows: {rows.dtype} {rows.shape}: bytes [n, row_bytes] are needed")
        for name, form in (("src", src), ("dst", dst)):
            check_kind(name, form, RowFormat)
        return self._file.convert_rows(rows, src, dst)

    def open_memory(self, spec: MemorySpec, *, kernel: bool, products: bool) -> OpenMemory:
        """Open stores of that shape and what computes over them, for a context.

        Args:
            spec: the shape.
            kernel: whether attention runs in a kernel of our own.
            products: whether products may be computed by code of our own.

        Raises:
            OptionError: a type that does not fit the heads.
            AllocationError: the K/V buffer cannot be had.
        """
        forward = self.architecture.forward
        return self._file.open_memory(spec, forward, kernel=kernel, products=products)

    def close(self) -> None:
        """Close all contexts, stop the threads and unmap the file; closing twice is fine.

        What an exception has interrupted is done by the next call.
        """
        self._architecture = None
        for context in list(self._contexts):
            with suppress(ClosedError):  # a forked process may not use it
                context.close()
        self._file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_whole(self) -> None:
        """Refuse a file that was truncated, as far as that shows: reading on ends the process."""
        was, now = self._file.stamp, FileStamp.at(self.path)
        is_same = now is not None and (now.device, now.inode) == (was.device, was.inode)
        if now is not None and is_same and now.n_bytes < was.n_bytes:
            raise ModelFileError(
                f"{self.path} was truncated from {was.n_bytes} to {now.n_bytes} bytes while it was "
                "open: load it again, and replace files in use by renaming"
            )

    def __repr__(self) -> str:
        spec = self.spec
        return f"<Model {self.path.name}: {spec.arch}, {len(spec.layers)} layers>"


def open_model_file(path: str | Path, backend: str, n_threads: int | None) -> ModelFile[Any]:
    """Open a GGUF file with a backend.

    Raises:
        OptionError: there is no such backend.
        ModelFileError: the file is missing, truncated, damaged or not GGUF.
        LibraryError: the backend's library cannot be used.
    """
    check_choice("backend", backend, tuple(BACKENDS))
    module, _, name = BACKENDS[backend].partition(":")
    opened: ModelFile[Any] = getattr(import_module(module), name)(path, n_threads)
    return opened
