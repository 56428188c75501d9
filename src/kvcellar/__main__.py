"""``python -m kvcellar`` is the command ``kvcellar``."""

from kvcellar.cli.main import main

main()
