"""The command line. Each command is a dataclass: its fields are the options, their docstrings the help text."""

from pmlf.cli.main import main

__all__ = ["main"]
