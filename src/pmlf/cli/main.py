"""The command `pmlf`: parses the arguments, runs a command, and reports errors in one line with an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import tyro

import pmlf
from pmlf.cli.account import Account
from pmlf.cli.audit import Audit
from pmlf.cli.bench import Bench
from pmlf.cli.common import CONFIG, INTERRUPTED, Command, CommandFailure, say, telling_warnings
from pmlf.cli.filter import Filter
from pmlf.cli.help import print_commands, print_help
from pmlf.cli.plan import Planning
from pmlf.cli.probe import ProbeCommand
from pmlf.cli.report import Report
from pmlf.cli.reproduce import Reproduce
from pmlf.cli.selftest import SelfTest
from pmlf.cli.training import Compare, Train
from pmlf.cli.tune import Tune
from pmlf.cli.unknown import way_out
from pmlf.cli.use import Evaluate, Export, Predict
from pmlf.parallel.failure import RankFailed

COMMANDS: dict[str, type[Command]] = {
    "train": Train,
    "compare": Compare,
    "predict": Predict,
    "evaluate": Evaluate,
    "export": Export,
    "plan": Planning,
    "tune": Tune,
    "probe": ProbeCommand,
    "account": Account,
    "filter": Filter,
    "audit": Audit,
    "bench": Bench,
    "selftest": SelfTest,
    "reproduce": Reproduce,
    "report": Report,
}


def parsed(argv: list[str] | None = None) -> Command:
    """The command that some arguments ask for.

    Args:
        argv: the arguments; those of the process by default.

    Raises:
        SystemExit: the parser has printed what it refuses.
    """
    choices: dict[str, Callable[..., Command]] = {**COMMANDS}
    return tyro.extras.subcommand_cli_from_dict(choices, prog="pmlf", args=argv, config=CONFIG)


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
    given = sys.argv[1:] if argv is None else argv
    if given == ["--version"]:
        print(f"pmlf {pmlf.__version__}")
        return 0
    if {"-h", "--help"} & set(given):
        print_help(given[0], COMMANDS[given[0]]) if given[0] in COMMANDS else print_commands(COMMANDS)
        return 0
    with telling_warnings(say):
        command: Command | None = None
        try:
            command = parsed(argv)
            return command.execute()
        except SystemExit as stop:  # the parser has printed what it refuses
            if command is None and (hint := way_out(given, COMMANDS)) is not None:
                say(f"error: {hint}")
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except KeyboardInterrupt:
            say("interrupted")
            return INTERRUPTED
        except BrokenPipeError:  # the reader of the output has ended, as in `pmlf filter | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (RankFailed, ValueError, OSError) as error:
            failure = CommandFailure.of(error, command)
            say(f"error: {failure.sentence}")
            return failure.exit_code
