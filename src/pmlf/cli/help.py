"""`--help` of the commands: options in groups, and examples that can be typed as they are."""

from __future__ import annotations

import argparse
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tyro
from rich.console import Console

from pmlf.cli.common import CONFIG, Command

_WIDE = 70  # columns from which options and their explanations stand side by side
_LEFT = 26

# Options by group; the same name means the same in every command. Those of one command alone are in its own group.
_GROUPS: dict[str, str] = {
    "data": "dataset data-dir records holdout augment augment-per-point task labels label-column target-range "
    "image-size text-column text-pair-column columns schema features classes public-dataset share judged "
    "final-holdout split text channels examples",
    "model": "model lora-rank head-only prior max-length parameters input-norm device autocast average head",
    "privacy": "epsilon epsilons noise-multiplier delta clip-norm clipping clip-quantile largest-batch secure-noise "
    "seed unit-column max-records-per-unit ledger group certificate mode mean-trials distribution sample-rate",
    "optimisation": "method methods k beta a b bands gamma outer-momentum kappa lr lrs seeds "
    "optimizer batch-size batch-sizes epochs steps ema max-physical-batch-size grid whitening intercept",
    "output": "out json plot html log resume checkpoint-every show-sensitive diagnostics check-on-data jobs format "
    "markdown latex figures help",
}
_OWN = "of this command"

EXAMPLES: Mapping[str, tuple[str, str, str]] = {
    "train": (
        "pmlf train",
        "pmlf train --dataset photos --labels cat dog --image-size 64 --epsilon 3 --epochs 20 --out runs/pets",
        "pmlf train --dataset visits.csv --columns age=0:110 --labels no yes --unit-column patient_id --holdout 0.2",
    ),
    "compare": (
        "pmlf compare",
        "pmlf compare --methods dpsgd dp-pmlf --epsilon 1 --epochs 10",
        "pmlf compare --dataset cifar10 --data-dir DATA --model cnn5 --lr 1 --plot accuracy.png",
    ),
    "predict": (
        "pmlf predict runs/pets cat.jpg photos/",
        "pmlf predict runs/reviews new.csv --out predictions.csv",
        "pmlf predict runs/reviews --text 'what a film'",
    ),
    "evaluate": (
        "pmlf evaluate runs/pets --dataset photos",
        "pmlf evaluate runs/adult --dataset new.csv --label-column income",
        "pmlf evaluate runs/mnist --dataset mnist --data-dir DATA --split test",
    ),
    "export": (
        "pmlf export runs/pets",
        "pmlf export runs/pets --format onnx --out pets.onnx",
        "pmlf export runs/pets --format hub --out pets-for-the-hub",
    ),
    "plan": (
        "pmlf plan --records 50000 --model cnn5",
        "pmlf plan --records 4000 --features 20 --model mlp --classes 2 --epsilons 1 2",
        "pmlf plan --records 1000000 --parameters 25000000 --html plan.html",
    ),
    "tune": (
        "pmlf tune --grid lr=0.5,1,2 --epsilon 3 --out tuned",
        "pmlf tune --mode accounted --mean-trials 10 --grid lr=0.5,1,2 clip-norm=0.5,1 --epsilon 3",
        "pmlf tune --resume tuned --jobs 2",
    ),
    "probe": (
        "pmlf probe features.npy --labels labels.npy --classes 10 --epsilon 1",
        "pmlf probe embeddings.parquet --labels label --classes 2 --epsilon 0.5 --out runs/probe",
        "pmlf probe --resume runs/probe",
    ),
    "account": (
        "pmlf account --records 50000 --batch-size 1000 --epochs 20 --epsilon 3",
        "pmlf account --records 50000 --batch-size 1000 --steps 500 --noise-multiplier 1.1 --group 5",
        "pmlf account --certificate runs/pets/certificate.json",
    ),
    "filter": (
        "pmlf filter --a -0.9 --b 0.1",
        "pmlf filter --butterworth 2 0.1 --plot filter.png",
        "pmlf filter --moving-average 5",
    ),
    "audit": (
        "pmlf audit --method dp-pmlf --epsilon 2",
        "pmlf audit --model cnn5 --runs 0",
        "pmlf audit --controls",
    ),
    "bench": (
        "pmlf bench",
        "pmlf bench --cases cnn5 linear --rounds 3 --freed-memory kept",
        "pmlf bench --cases llama --contenders plain opacus pmlf-k1 --out bench.json",
    ),
    "selftest": ("pmlf selftest", "pmlf selftest --device cuda", "pmlf selftest --json"),
    "reproduce": (
        "pmlf reproduce --list",
        "pmlf reproduce table-4 --profile smoke --out results",
        "pmlf reproduce all --profile cpu --jobs 2",
    ),
    "report": (
        "pmlf report runs/pets runs/other --out runs.html",
        "pmlf report results",
        "pmlf report results --markdown results.md --figures figures",
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Group:
    title: str
    options: list[argparse.Action] = field(default_factory=list)


def print_help(name: str, command: type[Command]) -> None:
    """Print the help of a command: what it does, its options in groups, and three examples."""
    parser = _parser(name, command)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    width = max(24, console.width)
    inputs = [action for action in parser._actions if not action.option_strings]
    console.print(" ".join([f"usage: pmlf {name}", *(_shown(action) for action in inputs), "[options]"]))
    for paragraph in (parser.description or "").split("\n\n"):
        console.print("\n" + textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False))
    for group in _grouped(parser._actions, inputs):
        console.print(f"\n{group.title}", style="bold")
        for action in group.options:
            console.print("\n".join(_lines(action, width)))
    console.print("\nexamples", style="bold")
    for example in EXAMPLES[name]:
        console.print(f"  {example}")


def print_commands(commands: Mapping[str, type[Command]]) -> None:
    """Print what there is: every command with the first sentence of its help."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    width = max(24, console.width)
    console.print(f"usage: pmlf [-h] {{{','.join(commands)}}}\n")
    about = (
        "Differentially private training: DP-SGD, DP-PMLF and their family. `pmlf --version` prints the version, "
        "`pmlf COMMAND --help` the options of a command with examples."
    )
    console.print(textwrap.fill(about, width) + "\n")
    for name, command in commands.items():
        first = " ".join((command.__doc__ or "").split("\n\n")[0].split())
        console.print("\n".join(_columns(f"  {name}", first, width, left=13)))


def option_names(name: str, command: type[Command]) -> frozenset[str]:
    """The options of a command, as they are typed."""
    return frozenset(option for action in _parser(name, command)._actions for option in action.option_strings)


def _parser(name: str, command: type[Command]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro has no other way to list the options
        return tyro.extras.get_parser(command, prog=f"pmlf {name}", config=CONFIG)


def _grouped(actions: Iterable[argparse.Action], inputs: Sequence[argparse.Action]) -> list[_Group]:
    groups = {title: _Group(title=title) for title in ("inputs", *_GROUPS, _OWN)}
    places = {f"--{name}": title for title, names in _GROUPS.items() for name in names.split()}
    for action in actions:
        title = "inputs" if action in inputs else places.get(action.option_strings[-1], _OWN)
        groups[title].options.append(action)
    return [group for group in groups.values() if group.options]


def _shown(action: argparse.Action) -> str:
    """An option with its value, or the name of an input."""
    metavar = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
    value = "" if action.nargs == 0 or metavar is None else metavar
    return " ".join(filter(None, [", ".join(action.option_strings), value])) or action.dest


def _lines(action: argparse.Action, width: int) -> list[str]:
    text = " ".join((action.help or "").split())
    for written, meant in ((" (default: )", ""), ("(default: None)", "(default: none)"), ("%%", "%")):  # of argparse
        text = text.replace(written, meant)
    return _columns(f"  {_shown(action)}", text, width, left=_LEFT)


def _columns(name: str, text: str, width: int, *, left: int) -> list[str]:
    """A name and its explanation: side by side, or below each other on a narrow terminal."""
    indent = left if width >= _WIDE else 4
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False, break_long_words=False)
    if width >= _WIDE and len(name) < indent and lines:
        first, *rest = lines
        return [name.ljust(indent) + first, *(" " * indent + line for line in rest)]
    return [name, *(" " * indent + line for line in lines)]
