"""What every command shares: a result as JSON or to be read, one-line messages, pictures checked early."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

REFUSED = 2
INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended
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


def check_plot(path: Path | None) -> None:
    """Before the work that a picture is of, not after it."""
    if path is None:
        return
    if path.suffix not in _PLOT_SUFFIXES:
        raise ValueError(f"plot={str(path)!r} is not a kind of picture: end it in {', '.join(_PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"plot={str(path)!r} is in no folder that exists: make {str(path.parent)!r} first")
