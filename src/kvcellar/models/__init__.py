"""Model architectures, each written once in terms of ``Ops``."""
