"""What all commands share: output as JSON or text, one-line messages, and errors in terms of flags."""

from __future__ import annotations

import json
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import tyro
from rich.console import Console, RenderableType

from pmlf.experiments.spec import flag
from pmlf.parallel.failure import RankFailed

CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)  # of the parser
REFUSED = 2
INTERRUPTED = 130  # the exit code that a shell reports after Ctrl-C
_LIBRARY_NAMES = {"target_epsilon": "--epsilon", "target_delta": "--delta"}  # arguments whose flag has another name
_PLOT_SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """Base class of all commands."""

    json: bool = False
    """Print one JSON document on stdout and nothing else."""

    @abstractmethod
    def execute(self) -> int:
        """Run the command and return the exit code."""

    def show(self, document: Mapping[str, Any], *readable: RenderableType) -> None:
        """Print the result on stdout: `document` with --json, otherwise `readable`."""
        if self.json:
            print(json.dumps(document, indent=2))
        else:
            Console(soft_wrap=True, highlight=False, markup=False).print(*readable, sep="\n")


def say(message: str) -> None:
    """Print a message on stderr as one line."""
    print("pmlf:", " ".join(message.split()), file=sys.stderr)


@contextmanager
def telling_warnings(tell: Callable[[str], None]) -> Iterator[None]:
    """A block whose warnings are told as messages."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        tell(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


@dataclass(frozen=True, kw_only=True)
class CommandFailure:
    """How a command failed: the sentence that it prints, and its exit code."""

    sentence: str
    exit_code: int

    @staticmethod
    def of(error: RankFailed | ValueError | OSError, command: Command | None) -> CommandFailure:
        """The failure that an error of the library is: another process failed, or something was refused."""
        if isinstance(error, RankFailed):
            return CommandFailure(sentence=str(error), exit_code=1)
        return CommandFailure(sentence=in_words_of_the_command_line(error, command), exit_code=REFUSED)


def in_words_of_the_command_line(error: Exception, command: Command | None) -> str:
    """The message of a library error with arguments written as flags.

    The library writes an argument as `name=value` or, on its own, in backticks. Both become the flag of that name if
    the command has one: "batch_size=0" becomes "--batch-size=0", "`holdout`" becomes "--holdout". A name with an
    underscore is always an argument.
    """
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{str(error.filename)!r} does not exist: give a path that does"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)!r} cannot be used: {error.strerror}"
    options = set() if command is None else set(_option_names(command))
    typed = _LIBRARY_NAMES | {name: flag(name) for name in options}
    if "epsilons" in options:  # `pmlf plan` takes several
        typed["target_epsilon"] = flag("epsilons")
    if "mean_trials" in options:
        typed["mean"] = flag("mean_trials")  # of a `Selection`

    def as_flag(found: re.Match[str]) -> str:
        name = found["quoted"] or found["bare"]
        certain = found["quoted"] or "_" in name or found.string[found.end() :].startswith("=")
        return typed[name] if name in typed and certain else found[0]

    way_out = " or give --uncorrected" if "uncorrected" in options else ""
    message = str(error).replace(" or set corrected=False", way_out)
    return re.sub(r"`(?P<quoted>[a-z_]+)`|(?<![\w'.-])(?P<bare>[a-z_]+)(?!\w)", as_flag, message)


def _option_names(options: Any) -> Iterator[str]:
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            yield from _option_names(value)
        else:
            yield field.name


def dated_folder(name: str) -> Path:
    """The default folder of a command's results: runs/<date>-<time>-<name>."""
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"


def check_plot(path: Path | None) -> None:
    """Refuse a picture file that cannot be written, before the work starts."""
    if path is None:
        return
    if path.suffix not in _PLOT_SUFFIXES:
        raise ValueError(f"plot={str(path)!r} is not an image file: end the name in {', '.join(_PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"plot={str(path)!r}: the folder {str(path.parent)!r} does not exist; make it first")
