"""Products of quantised weights and activations, compiled by llvmlite at first use."""
