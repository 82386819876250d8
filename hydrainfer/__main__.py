"""`python -m hydrainfer` is the `hydrainfer` command."""

from hydrainfer.cli import main

main()
