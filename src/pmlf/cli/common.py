"""What every command shares: a result as JSON or to be read, one-line messages, pictures checked early."""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from pmlf.experiments.spec import flag

REFUSED = 2
INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended
_LIBRARY_NAMES = {"target_epsilon": "--epsilon", "target_delta": "--delta"}  # what options become in the library
_PLOT_SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """What every command can do."""

    json: bool = False
    """Print one JSON document on stdout, and nothing else there."""

    @abstractmethod
    def execute(self) -> int:
        """Do it, and return the exit code."""

    def show(self, document: Mapping[str, Any], *readable: RenderableType) -> None:
        """The result on stdout, as JSON or to be read."""
        if self.json:
            print(json.dumps(document, indent=2))
        else:
            Console(soft_wrap=True, highlight=False, markup=False).print(*readable, sep="\n")


def say(message: str) -> None:
    """One line on stderr, whatever the message has in it."""
    print("pmlf:", " ".join(message.split()), file=sys.stderr)


def in_words_of_the_command_line(error: Exception, command: Command | None) -> str:
    """An error's message with options as they are typed, where the library calls them by their Python names."""
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{str(error.filename)!r} does not exist: give one that does"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)!r} cannot be used: {error.strerror}"
    options = set() if command is None else set(_option_names(command))
    typed = _LIBRARY_NAMES | {name: flag(name) for name in options}

    def spelled(found: re.Match[str]) -> str:
        name = found[0]
        return typed[name] if name in typed and ("_" in name or found.string[found.end() :].startswith("=")) else name

    way_out = " or give --uncorrected" if "uncorrected" in options else ""
    message = str(error).replace(" or set corrected=False", way_out)
    return re.sub(r"(?<![\w'.-])[a-z_]+(?!\w)", spelled, message)


def _option_names(options: Any) -> Iterator[str]:
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            yield from _option_names(value)
        else:
            yield field.name


def check_plot(path: Path | None) -> None:
    """Before the work that a picture is of, not after it."""
    if path is None:
        return
    if path.suffix not in _PLOT_SUFFIXES:
        raise ValueError(f"plot={str(path)!r} is not a kind of picture: end it in {', '.join(_PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"plot={str(path)!r} is in no folder that exists: make {str(path.parent)!r} first")
