"""`pmlf train` and `pmlf compare`."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from pmlf.cli import display
from pmlf.cli.common import Command, check_plot, say
from pmlf.cli.run_display import compare_progress, train_progress
from pmlf.experiments.results import SENSITIVE_NOTE, RunResult, comparison_json, rate_note
from pmlf.experiments.spec import RunSpec, Setting, comparison, shown_default

if TYPE_CHECKING:  # torch behind it takes seconds to import
    from pmlf.checks.inspection import Checked

_Setting = Annotated[Setting, tyro.conf.arg(name="")]  # its options stand among the command's own


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(Command):
    """What training with one method and with several have in common."""

    setting: _Setting = field(default_factory=Setting)

    out: Annotated[Path | None, shown_default("runs/<date>-<time>-<dataset>-<model>-<method>, or -comparison")] = None
    """Folder to make for the results; one that exists is refused."""

    data_dir: Annotated[Path | None, shown_default("$PMLF_DATA, else the Hugging Face hub")] = None
    """Folder of datasets laid out as the hub lays them out, such as DATA_DIR/uoft-cs/cifar10."""

    checkpoint_every: Annotated[int | None, shown_default("none: one a minute", "STEPS")] = None
    """Steps from one checkpoint to the next. Without a seed, steps that a crash loses are done again with fresh noise,
    and cost epsilon twice; Ctrl-C and SIGTERM lose none, they make a checkpoint first."""

    show_sensitive: bool = False
    """Also show and record the training loss.
    It is computed from private data before noise is added, and epsilon does not cover it.
    For debugging, on data that need no protection."""

    def warn(self) -> None:
        if self.show_sensitive:
            say(f"warning: the training loss is shown and recorded, {SENSITIVE_NOTE}")

    def folder(self, name: str) -> Path:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        return self.out or Path("runs") / f"{stamp}-{self.setting.title}-{name}"


@dataclass(frozen=True, kw_only=True)
class Train(TrainingCommand):
    """Train a model with differential privacy and say what was spent.

    Without any option: CNN-5 by DP-PMLF on the 12,000 Fashion-MNIST images inside the package. The folder of the run
    gets spec.json, metrics.jsonl (a line an epoch), model.safetensors, certificate.json and .html, result.json and the
    ledger of what was spent. Ctrl-C ends a run early and keeps what was released; --resume goes on with it, or with one
    that was cut off. Epsilon is for adding or removing one training record; test records are not protected.
    """

    method: str = "dp-pmlf"
    """dp-pmlf, lp-dpsgd, dpsgd, inner-outer, disk.
    Without per-sample momentum: dp-pmlf-without-pm. Without low-pass filter: dp-pmlf-without-lf."""

    resume: Annotated[Path | None, shown_default("none, a new run", "RUN_DIR")] = None
    """Go on with the run in this folder where it was interrupted or cut off; all settings but --data-dir are in it.
    With the seed it began with it ends in the same weights. Without one it draws fresh noise, and lost steps are
    charged again, so that it may stop before its last step, at its epsilon. --epochs or --steps may ask for more: the
    run then stops where an RDP filter, which allows for such afterthoughts, reaches epsilon."""

    ledger: Annotated[Path | None, shown_default("ledger.jsonl in the folder", "FILE")] = None
    """Ledger that runs on this dataset share, made if it is not there. Every step is written to it before it is
    released, and --epsilon is then for all of its runs together, by an RDP filter."""

    check_on_data: bool = False
    """Before training, show what `pmlf.check` measures on the first training records: sensitivity, independence,
    agreement with autograd, cost of every layer. It is sensitive: for a terminal alone, and written nowhere.
    Without it the model is checked too, silently, on synthetic inputs of the same shapes."""

    diagnostics: bool = False
    """Also measure what the theory assumes, on 256 training records before every step, and write diagnostics.json.
    Gradients before the noise: sensitive, and epsilon does not cover it. For public data; needs --seed.
    `pmlf report` shows it."""

    def execute(self) -> int:
        from pmlf.experiments import runner

        if self.check_on_data and not sys.stderr.isatty():
            raise ValueError(
                "--check-on-data shows numbers computed from private records: run it on a terminal, not into a file or "
                "a pipe"
            )
        self.warn()
        if self.diagnostics:
            say(f"warning: diagnostics of gradients are recorded, {SENSITIVE_NOTE}")
        spec, out = self._continued(self.resume) if self.resume else self._new()
        console = Console(stderr=True)
        with train_progress(console) as observer:
            result = runner.run(
                spec,
                out,
                data_dir=self.data_dir,
                observer=observer,
                show_sensitive=self.show_sensitive,
                resume=self.resume is not None,
                ledger=self.ledger,
                checkpoint_every=self.checkpoint_every,
                diagnostics=self.diagnostics,
                show_check=partial(_print_check, console) if self.check_on_data else None,
            )
        self.show(result.to_json(), display.run_summary(result))
        return _ended(result)

    def _new(self) -> tuple[RunSpec, Path]:
        return RunSpec(method=self.method, **vars(self.setting)), self.folder(self.method)

    def _continued(self, folder: Path) -> tuple[RunSpec, Path]:
        """The folder's own spec; settings typed beside it, other than the plan, must not contradict it."""
        from pmlf.experiments.folder import RunFolder, continued

        if self.out is not None:
            raise ValueError(f"--out {self.out} and --resume {folder} both name the run's folder: give --resume alone")
        stored = RunFolder(folder).spec()
        typed = RunSpec(method=self.method, **vars(self.setting))
        defaults = vars(RunSpec())
        untouched = {name: vars(stored)[name] for name, value in vars(typed).items() if value == defaults[name]}
        return continued(stored, replace(typed, **untouched)), folder


@dataclass(frozen=True, kw_only=True)
class Compare(TrainingCommand):
    """Train with several methods, one after another, at the same epsilon, and compare their test accuracies.

    The seed, 0 by default, gives all methods the same initial weights and the same draws of records: a comparison, not
    models for release. They share the learning rate too; inner-outer's filter has a steady gain of 10, so it runs ten
    times hotter. The folder gets a folder for every method, comparison.json and a picture, accuracy.png.
    """

    setting: _Setting = field(default_factory=lambda: Setting(seed=0))

    methods: tuple[str, ...] = ("dpsgd", "lp-dpsgd", "inner-outer", "dp-pmlf")
    """Some of dpsgd, lp-dpsgd, inner-outer, dp-pmlf, disk, dp-pmlf-without-pm, dp-pmlf-without-lf.
    A method option goes to each method that takes it."""

    plot: Annotated[Path | None, shown_default("accuracy.png in the folder")] = None
    """Picture of test accuracy against epochs: a .png, .pdf or .svg file."""

    def execute(self) -> int:
        from pmlf.experiments import runner

        check_plot(self.plot)
        self.warn()
        specs = comparison(self.setting, self.methods)
        out = self.folder("comparison")
        with compare_progress(Console(stderr=True), self.methods) as observer:
            results = runner.compare(
                specs,
                out,
                data_dir=self.data_dir,
                observer=observer,
                show_sensitive=self.show_sensitive,
                checkpoint_every=self.checkpoint_every,
            )
        plot = self.plot or out / "accuracy.png"
        display.plot_accuracy(results, plot)
        self.show(
            {**comparison_json(results, out), "plot": str(plot)},
            display.comparison_table(results),
            rate_note(results),
            display.facts([("written to", str(out)), ("picture", str(plot))]),
        )
        last = results[-1]
        if last.signalled_by is not None and not last.interrupted and len(results) < len(specs):
            say(f"stopped as asked: {last.spec.method} is whole, {len(results)} of {len(specs)} methods were run")
            return _exit_code(last.signalled_by)
        return _ended(last)


def _print_check(console: Console, report: Checked) -> None:
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)


def _ended(result: RunResult) -> int:
    if result.interrupted_by is None:
        return 0
    say(f"interrupted: what was released is in {result.out}, and `pmlf train --resume {result.out}` goes on with it")
    return _exit_code(result.interrupted_by)


def _exit_code(signal_name: str) -> int:
    """As a shell reports a process that a signal ended."""
    return 128 + signal.Signals[signal_name]
