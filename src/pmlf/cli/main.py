"""The command `pmlf`: parses the arguments, runs a command, and reports errors in one line with an exit code."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, TextIO

import tyro

import pmlf
from pmlf.cli.account import Account
from pmlf.cli.audit import Audit
from pmlf.cli.bench import Bench
from pmlf.cli.common import INTERRUPTED, REFUSED, Command, in_words_of_the_command_line, say
from pmlf.cli.filter import Filter
from pmlf.cli.plan import Planning
from pmlf.cli.probe import ProbeCommand
from pmlf.cli.report import Report
from pmlf.cli.reproduce import Reproduce
from pmlf.cli.selftest import SelfTest
from pmlf.cli.training import Compare, Train
from pmlf.cli.tune import Tune
from pmlf.cli.use import Evaluate, Export, Predict
from pmlf.parallel.failure import RankFailed

_AnyCommand = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Planning, tyro.conf.subcommand("plan")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[ProbeCommand, tyro.conf.subcommand("probe")]
    | Annotated[Account, tyro.conf.subcommand("account")]
    | Annotated[Filter, tyro.conf.subcommand("filter")]
    | Annotated[Audit, tyro.conf.subcommand("audit")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[SelfTest, tyro.conf.subcommand("selftest")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code: 0, 2 for refused arguments, 130 after Ctrl-C, or the command's own.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    pmlf 0...
    0
    """
    if (sys.argv[1:] if argv is None else argv) == ["--version"]:
        print(f"pmlf {pmlf.__version__}")
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        command: Command | None = None
        try:
            command = tyro.cli(
                _AnyCommand,
                prog="pmlf",
                description="Differentially private training: DP-SGD, DP-PMLF and their family. "
                "`pmlf --version` prints the version.",
                args=argv,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            )
            return command.execute()
        except SystemExit as stop:  # --help, or the parser has printed what it refuses
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except KeyboardInterrupt:
            say("interrupted")
            return INTERRUPTED
        except BrokenPipeError:  # the reader of the output has ended, as in `pmlf filter | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except RankFailed as failure:
            say(f"error: {failure}")
            return 1
        except (ValueError, OSError) as error:
            say(f"error: {in_words_of_the_command_line(error, command)}")
            return REFUSED


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    say(f"warning: {message}")
