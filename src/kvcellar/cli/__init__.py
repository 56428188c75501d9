"""The command ``kvcellar``: run, chat, info and tour.

Answers go to stdout, everything else to stderr. What a command needs is imported when it runs, so
that ``--help`` costs next to nothing.
"""
