"""Attention of a few tokens over lists of cells, compiled for this processor by llvmlite."""
