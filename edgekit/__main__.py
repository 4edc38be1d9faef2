"""`python -m edgekit`."""

from edgekit.cli import main

main()
