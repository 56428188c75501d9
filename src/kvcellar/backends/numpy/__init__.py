"""The NumPy backend: slow, obvious, without ggml; what the fast one is compared with.

Quantised types and GGUF files are left to the package ``gguf``, the extra ``kvcellar[numpy]``.
"""
