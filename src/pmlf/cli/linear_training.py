"""`pmlf train --model prior-linear` or `--prior`: compute features, then train a private linear model on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pmlf.cli import display
from pmlf.cli.probe import ProbeCommand
from pmlf.cli.run_display import train_progress
from pmlf.experiments.options import OwnData
from pmlf.experiments.spec import RunSpec, Setting, flag

if TYPE_CHECKING:
    from pmlf.cli.training import Train
    from pmlf.experiments.results import RunResult

MODEL = "prior-linear"
_OF_NETWORKS_ALONE = ("checkpoint_every", "check_on_data", "diagnostics", "show_sensitive", "log", "ray_workers")
_OF_NETWORKS = ("ledger", *_OF_NETWORKS_ALONE)
_SMALL_EPSILON = 8.0  # up to here it was the more accurate one on CIFAR-10, where both were measured
_SECONDS_PER_IMAGE = {1: 0.0046, 3: 0.0095}  # of 32x32 pixels by channels, measured
_OF_PROBES = ("epsilon", "delta", "steps", "batch_size", "clip_norm", "holdout", "seed")


def train(command: Train, spec: RunSpec, out: Path) -> RunResult:
    """Run the spec and print its result."""
    from pmlf.experiments import linear_features, prior_linear
    from pmlf.experiments.folder import RunFolder

    for name in _OF_NETWORKS:
        if getattr(command, name):
            of = f"--model {MODEL}" if spec.pretrained.prior is None else f"--prior {spec.pretrained.prior}"
            raise ValueError(f"{flag(name)} is not an option of {of}: leave it out")
    console, resume = Console(stderr=True), command.resume is not None
    _, _, finished = prior_linear.found(spec, RunFolder(out), resume=resume)
    if finished is None:
        with _extraction_progress(console) as extracting:
            linear_features.feature_splits(spec, command.data_dir, extracting)
    with train_progress(console) as observer:
        result = prior_linear.run(spec, out, data_dir=command.data_dir, observer=observer, resume=resume)
    command.show(result.to_json(), display.run_summary(result))
    return result


def on_features(command: Train) -> ProbeCommand:
    """`pmlf train --features` as the command `pmlf probe`.

    Raises:
        ValueError: An option is given that only datasets or networks have.
    """
    given, usual = vars(command.setting), vars(Setting())
    if command.features is None:
        raise ValueError("--classes is for --features FILE: with a dataset, give --labels")
    for name in (*_OF_NETWORKS_ALONE, "resume", "data_dir"):
        if getattr(command, name):
            raise ValueError(f"{flag(name)} is not an option of --features: leave it out, or see `pmlf probe --help`")
    for name, value in given.items():
        if name not in (*_OF_PROBES, "own") and value != usual[name]:
            raise ValueError(f"{flag(name)} is not an option of --features: leave it out, or see `pmlf probe --help`")
    labels = command.setting.own.labels or (None,)
    if len(labels) > 1 or replace(command.setting.own, labels=None) != OwnData():
        raise ValueError("--features takes one file, array or column as --labels; declare the classes with --classes")
    chosen = {name: given[name] for name in _OF_PROBES if given[name] != usual[name]}
    return ProbeCommand(
        features=command.features,
        labels=labels[0],
        classes=command.classes,
        out=command.out,
        ledger=command.ledger,
        json=command.json,
        **chosen,
    )


def advice(result: RunResult) -> str | None:
    """What a private linear model would cost instead of a network of images at a small epsilon; None elsewhere."""
    from pmlf import data
    from pmlf.experiments.form import ModelForm
    from pmlf.priors.prior import LARGEST_WORKING_SIDE
    from pmlf.priors.synthetic import LARGEST_SIDE, SMALLEST_SIDE

    epsilon, spec = result.spec.epsilon, result.spec
    if epsilon is None or epsilon > _SMALL_EPSILON or spec.kind != "image" or result.interrupted:
        return None
    if spec.own.unit_column is not None:  # prior-linear protects records
        return None
    form = ModelForm.read(result.out)
    images = form.inputs
    if not isinstance(images, data.ImageForm) or not isinstance(form.target, data.Classes) or form.pretrained:
        return None
    if not SMALLEST_SIDE <= images.size <= LARGEST_SIDE:
        return None
    records = json.loads((result.out / "certificate.json").read_text())["records"]
    seconds = records * _SECONDS_PER_IMAGE[images.channels] * (min(images.size, LARGEST_WORKING_SIDE) / 32) ** 2
    return (
        f"at epsilon {epsilon:g}, --model {MODEL} may be more accurate: a private linear model on features from "
        f"synthetic images, which take about {display.duration(seconds)} of one core for these {records:,} images, once"
    )


@contextmanager
def _extraction_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of the records whose features are computed; the work continues after an interruption."""
    columns = (TextColumn("features"), BarColumn(bar_width=12), MofNCompleteColumn(), TextColumn("records"))
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console, transient=True) as progress:
        task = progress.add_task("features", total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
