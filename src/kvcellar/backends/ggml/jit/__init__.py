"""Kernels that llvmlite compiles at the first use: attention and quantised products.

Files named ``_code`` (with ``ir`` and ``lanes``) import llvmlite; the others do not, so that the
backend works without it.
"""
