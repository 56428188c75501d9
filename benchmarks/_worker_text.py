"""llama.cpp, through llama-cpp-python, as ``text.py`` asks it; it needs nothing of kvcellar."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from time import perf_counter
from typing import Any

from _protocol import Measured, serve


class LlamaText:
    """A vocabulary, a template and a chain of samplers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        del settings
        import llama_cpp
        import numpy as np

        self.np: Any = np
        self.lib: Any = llama_cpp
        self.logging = self.lib.llama_log_callback(lambda *_: None)
        self.lib.llama_log_set(self.logging, None)

    def hello(self) -> dict[str, str]:
        """Say which version it is."""
        return {"version": self.lib.__version__}

    def prepare(self, settings: dict[str, Any]) -> Measured:
        """Load the vocabulary and make what is timed."""
        lib = self.lib
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self.model = lib.llama_model_load_from_file(settings["model"].encode(), params)
        if not self.model:
            raise RuntimeError(f"it cannot load {settings['model']}")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.text = settings["text"].encode()
        self.ids = (lib.llama_token * len(self.text))()
        self.messages = settings["messages"]
        self.formatter = self._formatter()
        self.logits = self.np.array(settings["logits"], self.np.float32)
        self.n_samples = settings["n_samples"]
        self.chain = self._chain(settings["sampling"])
        for token in settings["history"]:
            lib.llama_sampler_accept(self.chain, token)
        self.grammar = self._grammar(settings["schema"])
        self.value = settings["value"]
        return {"": {"seconds": 0.0, "count": 1}}

    def tokenise(self) -> Measured:
        """Tokenise the text."""

        def run() -> None:
            n = self.lib.llama_tokenize(
                self.vocab, self.text, len(self.text), self.ids, len(self.ids), True, False
            )
            assert n > 0, n

        return _timed(run)

    def render(self) -> Measured:
        """Render the chat."""
        return _timed(lambda: self.formatter(messages=self.messages))

    def prompt(self) -> Measured:
        """Render the chat and tokenise that."""

        def run() -> None:
            text = self.formatter(messages=self.messages).prompt.encode()
            n = self.lib.llama_tokenize(
                self.vocab, text, len(text), self.ids, len(self.ids), False, True
            )
            assert n > 0, n

        return _timed(run)

    def sample(self) -> Measured:
        """Sample some tokens, from the same logits each time."""
        apply = self._applied(self.chain)

        def run() -> None:
            for _ in range(self.n_samples):
                apply()

        return _timed(run)

    def mask(self) -> Measured:
        """Find what may follow, token by token of a value that fits a schema."""
        lib, apply = self.lib, self._applied(self.grammar)
        lib.llama_sampler_reset(self.grammar)

        def run() -> None:
            for token in self.value:
                apply()
                lib.llama_sampler_accept(self.grammar, token)

        return _timed(run)

    def _applied(self, sampler: Any) -> Callable[[], None]:
        """Return what applies a sampler to the logits."""
        lib, n = self.lib, len(self.logits)
        kind = [("id", self.np.intc), ("logit", self.np.single), ("p", self.np.single)]
        data = self.np.recarray((n,), dtype=self.np.dtype(kind, align=True))
        ids = self.np.arange(n, dtype=self.np.intc)

        def apply() -> None:
            data["id"], data["logit"], data["p"] = ids, self.logits, 0.0
            pointer = data.ctypes.data_as(lib.llama_token_data_p)
            row = lib.llama_token_data_array(data=pointer, size=n, selected=-1, sorted=False)
            lib.llama_sampler_apply(sampler, ctypes.byref(row))

        return apply

    def _grammar(self, schema: str) -> Any:
        from llama_cpp.llama_grammar import json_schema_to_gbnf

        text = json_schema_to_gbnf(schema).encode()
        grammar = self.lib.llama_sampler_init_grammar(self.vocab, text, b"root")
        if not grammar:
            raise RuntimeError("it cannot make a grammar of the schema")
        return grammar

    def _formatter(self) -> Any:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        lib = self.lib
        template = lib.llama_model_chat_template(self.model, None)
        if not template:
            raise RuntimeError("the model has no chat template")
        eos, bos = (
            lib.llama_vocab_get_text(self.vocab, token(self.vocab)).decode()
            for token in (lib.llama_vocab_eos, lib.llama_vocab_bos)
        )
        return Jinja2ChatFormatter(template=template.decode(), eos_token=eos, bos_token=bos)

    def _chain(self, o: dict[str, Any]) -> Any:
        lib = self.lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        breakers = [b"\n", b":", b'"', b"*"]
        strings = (ctypes.c_char_p * len(breakers))(*breakers)
        for sampler in (
            lib.llama_sampler_init_penalties(
                len(self.logits),
                64,
                o["repetition_penalty"],
                o["frequency_penalty"],
                o["presence_penalty"],
            ),
            lib.llama_sampler_init_dry(
                self.vocab, o["dry_multiplier"], 1.75, 2, 64, strings, len(breakers)
            ),
            lib.llama_sampler_init_top_n_sigma(o["top_n_sigma"]),
            lib.llama_sampler_init_top_k(o["top_k"]),
            lib.llama_sampler_init_typical(o["typical_p"], 0),
            lib.llama_sampler_init_top_p(o["top_p"], 0),
            lib.llama_sampler_init_min_p(o["min_p"], 0),
            lib.llama_sampler_init_xtc(o["xtc_probability"], o["xtc_threshold"], 0, o["seed"]),
            lib.llama_sampler_init_temp_ext(o["temperature"], o["dynatemp_range"], 1.0),
            lib.llama_sampler_init_dist(o["seed"]),
        ):
            lib.llama_sampler_chain_add(chain, sampler)
        return chain


def _timed(run: Callable[[], object]) -> Measured:
    start = perf_counter()
    run()
    return {"": {"seconds": perf_counter() - start, "count": 1}}


if __name__ == "__main__":
    serve(LlamaText)
