"""The command ``kvcellar``: run, chat, info, cache and tour; one module a command.

Answers go to stdout, everything else to stderr. What a command needs is imported when it runs, so
that ``--help`` costs next to nothing.
"""

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
