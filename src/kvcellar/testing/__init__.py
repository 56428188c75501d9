"""Test kit that ships with the library: naive oracles, Hypothesis machines, stores without bytes.

Import what is needed from the submodules; ``machine`` and ``strategies`` need Hypothesis.
"""
