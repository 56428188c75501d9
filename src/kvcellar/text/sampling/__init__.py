"""The samplers behind :mod:`kvcellar.text.sampler`, an idea a file."""
