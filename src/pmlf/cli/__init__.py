"""The command line: a dataclass a command, whose fields are the options and whose docstrings are the help."""

from pmlf.cli.main import main

__all__ = ["main"]
