"""Our own kernels, compiled by llvmlite when first used: attention and quantised products."""
