"""Attention over lists of cells, compiled for this processor by llvmlite."""
