"""What to type instead of a command or an option that there is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pmlf.basics.arguments import did_you_mean
from pmlf.cli.common import Command
from pmlf.cli.help import option_names

_OF_OTHERS: Mapping[str, str] = {  # names of other libraries
    "--eps": "--epsilon",
    "--learning-rate": "--lr",
    "--max-grad-norm": "--clip-norm",
    "--max-per-sample-grad-norm": "--clip-norm",
    "--num-train-epochs": "--epochs",
    "--output-dir": "--out",
    "--per-device-train-batch-size": "--batch-size",
    "--sigma": "--noise-multiplier",
    "--target-delta": "--delta",
    "--target-epsilon": "--epsilon",
}


def way_out(given: Sequence[str], commands: Mapping[str, type[Command]]) -> str | None:
    """A sentence on the first command or option among refused arguments that does not exist; None if all exist.

    >>> from pmlf.cli.main import COMMANDS
    >>> way_out(["trian"], COMMANDS)
    "there is no command 'trian'. Did you mean 'train'? `pmlf --help` lists the commands"
    >>> way_out(["train", "--max-grad-norm", "1"], COMMANDS)
    'pmlf train has no option --max-grad-norm: give --clip-norm. `pmlf train --help` lists the options'
    """
    if not given or given[0].startswith("-"):
        return None
    name, *words = given
    if name not in commands:
        return f"there is no command {name!r}{_ended(did_you_mean(name, commands))} `pmlf --help` lists the commands"
    known = option_names(name, commands[name])
    words_of_known = [option for option in known if len(option) > len("--a")]  # a letter is near many words
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option not in known:
            instead = _OF_OTHERS.get(option)
            hint = f": give {instead}." if instead in known else _ended(did_you_mean(option, words_of_known))
            return f"pmlf {name} has no option {option}{hint} `pmlf {name} --help` lists the options"
    return None


def _ended(hint: str) -> str:
    return hint or "."
