"""Interrupts operations at every place where CPython can raise, and proves that none is half done.

::

    python -m kvcellar.testing.interrupts                    # every model, operation and backend
    python -m kvcellar.testing.interrupts --only ggml/llama  # those whose names begin so
    python -m kvcellar.testing.interrupts --only ggml/llama/append --at 117

An exception that comes from outside (Ctrl-C, an alarm, ``PyThreadState_SetAsyncExc``, no memory)
ends an operation anywhere. It has happened then or it has not, and everything can still be used;
`contexts` says what that means. `points` says where exceptions can come, `signals` sends real ones
at random moments, `trials` tells what came of each, and `workers` survives what crashes.
"""
