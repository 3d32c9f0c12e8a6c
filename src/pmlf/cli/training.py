"""`pmlf train` and `pmlf compare`: train with one method or several."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from pmlf.cli import display, linear_training
from pmlf.cli.common import Command, check_plot, dated_folder, say
from pmlf.cli.run_display import compare_progress, train_progress
from pmlf.experiments.comparing import by_method, comparison_json, rate_note
from pmlf.experiments.results import SENSITIVE_NOTE, RunResult
from pmlf.experiments.spec import RunSpec, Setting, comparison, shown_default

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from pmlf.checks.inspection import Checked
    from pmlf.experiments.results import RunObserver
    from pmlf.parallel.processes import Processes

_Setting = Annotated[Setting, tyro.conf.arg(name="")]  # no prefix: its options are options of the command


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(Command):
    """Options of both `pmlf train` and `pmlf compare`."""

    setting: _Setting = field(default_factory=Setting)

    out: Annotated[Path | None, shown_default("runs/<date>-<time>-<dataset>-<model>-<method>, or -comparison")] = None
    """New folder for the results. An existing folder is refused."""

    data_dir: Annotated[Path | None, shown_default("$PMLF_DATA, else the Hugging Face hub")] = None
    """Folder of datasets with the layout of the Hugging Face hub, such as DATA_DIR/uoft-cs/cifar10."""

    checkpoint_every: Annotated[int | None, shown_default("one checkpoint per minute", "STEPS")] = None
    """Number of steps between checkpoints. A crash loses the steps since the last one. Without a seed they are repeated
    with new noise and cost epsilon twice. Ctrl-C and SIGTERM write a checkpoint first and lose no step."""

    show_sensitive: bool = False
    """Also show and record the training loss.
    It is computed from private data without noise, so epsilon does not cover it. For debugging on public data."""

    def warn(self) -> None:
        if self.show_sensitive:
            say(f"warning: --show-sensitive shows and records the training loss, {SENSITIVE_NOTE}")

    def folder(self, name: str) -> Path:
        return self.out or dated_folder(f"{self.setting.title}-{name}")


@dataclass(frozen=True, kw_only=True)
class Train(TrainingCommand):
    """Train a model with differential privacy and print the epsilon spent.

    With no options: CNN-5 with DP-PMLF on 12,000 Fashion-MNIST images that come with the package. The run's folder
    gets spec.json, metrics.jsonl (one line per epoch), model.safetensors, certificate.json, certificate.html,
    result.json and a ledger of the privacy spent. Ctrl-C stops a run early and keeps its results; --resume continues a
    stopped or crashed run. Epsilon is for adding or removing one training record. Test records are not protected.
    `torchrun --nproc-per-node 2 -m pmlf train ...` runs the same on two processes, --ray-workers 2 on two of Ray.
    """

    method: str = "dp-pmlf"
    """dp-pmlf, lp-dpsgd, dpsgd, inner-outer or disk; dp-pmlf-shaped or lp-dpsgd-shaped (shaped noise, as with --bands);
    for ablations dp-pmlf-without-pm (no per-sample momentum) or dp-pmlf-without-lf (no low-pass filter)."""

    resume: Annotated[Path | None, shown_default("none, a new run", "RUN_DIR")] = None
    """Resume the run in this folder. The folder holds all its settings except --data-dir.
    A seeded run ends with the same weights as without the interruption. An unseeded run draws new noise and pays for
    lost steps again, so it may reach its epsilon and stop before its last step. --epochs or --steps can extend the run;
    its epsilon is then tracked by an RDP filter, which is valid for a plan changed during the run."""

    ledger: Annotated[Path | None, shown_default("ledger.jsonl in the run's folder", "FILE")] = None
    """Ledger that several runs on one dataset share; created if it does not exist. Every step is recorded before it is
    released. --epsilon then limits all runs in the ledger together, by an RDP filter."""

    check_on_data: bool = False
    """Before training, run `pmlf.check` on the first training records and show the result: sensitivity, independence,
    agreement with autograd, cost of each layer. The result is sensitive: it goes to a terminal only, never to a file.
    The check on synthetic inputs of the same shapes always runs."""

    diagnostics: bool = False
    """Measure the assumptions of the theory on 256 training records before every step, and write diagnostics.json for
    `pmlf report`. It uses gradients without noise, so it is sensitive and epsilon does not cover it. For public data;
    needs --seed."""

    features: Annotated[Path | None, shown_default("none", "FILE")] = None
    """Train a private linear model on precomputed features instead of a dataset, as `pmlf probe` does: a .npy, .npz or
    .parquet file. --labels is then the .npy file, the array or the column of the labels; --classes declares them.
    Defaults are those of `pmlf probe`: epsilon 1, delta 1e-5, clip norm 0.3, 30 steps with full batches."""

    classes: Annotated[tuple[str, ...], shown_default("none", "CLASS [CLASS ...]")] = ()
    """With --features: all possible classes, or their number if the labels are 0, 1, 2, ..."""

    log: Annotated[tuple[str, ...], shown_default("none", "NAME [NAME ...]")] = ()
    """Also log the released numbers with csv (log.csv in the run's folder), tensorboard (a folder in it), wandb or
    mlflow (at MLFLOW_TRACKING_URI). The last three are extras: `pip install 'dp-pmlf[tensorboard]'`."""

    ray_workers: Annotated[int | None, shown_default("none, this process", "N")] = None
    """Train on N workers that Ray Train starts, on the cluster at RAY_ADDRESS (auto: the one that this machine belongs
    to), or without that variable on this machine alone. They take every step together, as processes of torchrun do.
    Each needs a CPU, or a GPU with --device cuda, and their machines share the folder in which you type the command.
    No record, sum or key goes through Ray. It needs `pip install 'dp-pmlf[ray]'`."""

    def execute(self) -> int:
        from pmlf.parallel.launch import launched

        if self.check_on_data and not sys.stderr.isatty():
            raise ValueError(
                "--check-on-data shows numbers computed from private records: run it on a terminal, not with a file or "
                "a pipe as stderr"
            )
        if self.features is not None or self.classes:
            return linear_training.on_features(self).execute()
        if self.ray_workers is not None:
            return self._train_by_ray(self.ray_workers)
        with launched("pmlf train") as processes:
            return self._train(processes)

    def _train_by_ray(self, workers: int) -> int:
        from pmlf.cli import ray_training

        ray_training.refuse_impossible(self, workers)
        spec, out = self._planned()
        if _is_linear(spec):
            raise ValueError(f"--model {spec.model} trains on one process: start it without --ray-workers")
        with train_progress(Console(stderr=True)) as observer:
            result = ray_training.run(self, spec, out, workers, observer)
        return self._shown(result)

    def _train(self, processes: Processes) -> int:
        first = processes.rank == 0
        if first:
            self.warn()
            if self.diagnostics:
                say(f"warning: --diagnostics records measurements of gradients, {SENSITIVE_NOTE}")
        spec, out = processes.by_first(self._planned)
        if _is_linear(spec):
            if processes.size > 1:
                raise ValueError(f"--model {spec.model} trains on one process: start it without torchrun")
            return _ended(linear_training.train(self, spec, out))
        console = Console(stderr=True, quiet=not first)
        with train_progress(console) as observer:
            shown = partial(_print_check, console) if self.check_on_data else None
            result = self.run(spec, out, observer, first=first, show_check=shown)
        if not first:
            return _exit_code(result.interrupted_by) if result.interrupted_by else 0
        return self._shown(result)

    def run(
        self,
        spec: RunSpec,
        out: Path,
        observer: RunObserver,
        *,
        first: bool,
        show_check: Callable[[Checked], None] | None = None,
        asked_to_stop: Callable[[], str | None] | None = None,
    ) -> RunResult:
        """Run the spec in the folder `out` on this rank, with the options of this command; `first` on rank 0."""
        from pmlf.experiments import runner
        from pmlf.integrations import loggers

        return runner.run(
            spec,
            out,
            data_dir=self.data_dir,
            observer=observer,
            show_sensitive=self.show_sensitive,
            resume=self.resume is not None,
            ledger=self.ledger,
            checkpoint_every=self.checkpoint_every,
            diagnostics=self.diagnostics,
            show_check=show_check,
            callbacks=[loggers.by_name(name, out) for name in self.log if first],
            asked_to_stop=asked_to_stop,
        )

    def _shown(self, result: RunResult) -> int:
        """Print the result, and return the exit code."""
        self.show(result.to_json(), display.run_summary(result))
        if closing := linear_training.advice(result):
            say(closing)
        return _ended(result)

    def _planned(self) -> tuple[RunSpec, Path]:
        """The run to start or to resume, and its folder."""
        return self._resumed(self.resume) if self.resume else self._new()

    def _new(self) -> tuple[RunSpec, Path]:
        return RunSpec(method=self.method, **vars(self.setting)), self.folder(self.method)

    def _resumed(self, folder: Path) -> tuple[RunSpec, Path]:
        """The spec stored in the folder. Settings given on the command line must agree with it, except the plan."""
        from pmlf.experiments.folder import RunFolder, resumed_spec

        if self.out is not None:
            raise ValueError(f"--out {self.out} and --resume {folder} both name the run's folder: leave --out out")
        stored = RunFolder(folder).spec()
        typed = RunSpec(method=self.method, **vars(self.setting))
        defaults = vars(RunSpec())
        untouched = {name: vars(stored)[name] for name, value in vars(typed).items() if value == defaults[name]}
        return resumed_spec(stored, replace(typed, **untouched)), folder


@dataclass(frozen=True, kw_only=True)
class Compare(TrainingCommand):
    """Train with several methods at the same epsilon and compare their test accuracies.

    The seed, 0 by default, gives all methods the same initial weights and the same batches. Seeded models are for
    comparison, not for release. All methods use the same learning rate unless --lrs is given. The filter of inner-outer
    has a DC gain of 10, so its steps are ten times as large. The folder gets one folder per run, comparison.json and
    accuracy.png. Intervals are 95 %: over the seeds, or over the test records if there is one seed.
    """

    setting: _Setting = field(default_factory=lambda: Setting(seed=0))

    methods: tuple[str, ...] = ("dpsgd", "lp-dpsgd", "inner-outer", "dp-pmlf")
    """One or more of dpsgd, lp-dpsgd, inner-outer, dp-pmlf, disk, lp-dpsgd-shaped, dp-pmlf-shaped, dp-pmlf-without-pm,
    dp-pmlf-without-lf. A method option applies to each method that has it."""

    lrs: Annotated[tuple[float, ...], shown_default("--lr for all", "FLOAT [FLOAT ...]")] = ()
    """Learning rate of each method, in the order of --methods. Choose them on held-out records (--holdout)."""

    seeds: int = 1
    """Number of seeds, counted from --seed. Methods with the same seed share initial weights; the gain over the first
    method is a mean of paired differences."""

    plot: Annotated[Path | None, shown_default("accuracy.png in the results folder")] = None
    """Chart of test accuracy against epochs: a .png, .pdf or .svg file."""

    def execute(self) -> int:
        from pmlf.experiments import runner

        check_plot(self.plot)
        if self.setting.model == linear_training.MODEL or self.setting.pretrained.prior is not None:
            raise ValueError(
                "private linear models on features have one method, so there is nothing to compare: train them with "
                "`pmlf train`"
            )
        self.warn()
        specs = comparison(self.setting, self.methods, lrs=self.lrs, seeds=self.seeds)
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
        display.plot_accuracy(by_method(results), plot)
        self.show(
            {**comparison_json(results, out), "plot": str(plot)},
            display.comparison_table(by_method(results)),
            rate_note(results),
            display.facts([("written to", str(out)), ("chart", str(plot))]),
        )
        last = results[-1]
        if last.signalled_by is not None and not last.interrupted and len(results) < len(specs):
            say(f"stopped after {last.spec.method}: {len(results)} of {len(specs)} runs are complete")
            return _exit_code(last.signalled_by)
        return _ended(last)


def _is_linear(spec: RunSpec) -> bool:
    """Whether the run is a private linear model on features."""
    return spec.model == linear_training.MODEL or spec.pretrained.prior is not None


def _print_check(console: Console, report: Checked) -> None:
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)


def _ended(result: RunResult) -> int:
    if result.interrupted_by is None:
        return 0
    say(f"interrupted: the results so far are in {result.out}; resume with `pmlf train --resume {result.out}`")
    return _exit_code(result.interrupted_by)


def _exit_code(signal_name: str) -> int:
    """The exit code that a shell reports for a process ended by this signal."""
    return 128 + signal.Signals[signal_name]
