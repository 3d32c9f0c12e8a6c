"""`pmlf tune`: choose hyper-parameters, and say what that costs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pmlf.cli.common import Command, dated_folder, say
from pmlf.cli.display import facts
from pmlf.experiments.options import shown_default
from pmlf.experiments.spec import RunSpec, Setting

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from pmlf.tuning import TuningPlan, TuningResult
    from pmlf.tuning.tuner import TriedCandidate

_Setting = Annotated[Setting, tyro.conf.arg(name="")]  # no prefix: its options are options of the command


@dataclass(frozen=True, kw_only=True)
class Tune(Command):
    """Choose hyper-parameters from a grid, in one of three modes that are named by what they cost.

    held-out: trials on --public-dataset, or on a share of the training records that the final run leaves out. The
    other records pay nothing. accounted: a random number of trials on the training records; the best trial is the
    model, and its epsilon covers all of them. unaccounted: for research; the certificate says so. Every trial is as
    long as the run that it tunes for. The same command, or --resume, goes on after an interruption.
    """

    setting: _Setting = field(default_factory=Setting)

    method: str = "dp-pmlf"
    """The method, as in `pmlf train`."""

    grid: Annotated[tuple[str, ...], shown_default("lr=0.5,1,2,4", "NAME=VALUE,... [NAME=VALUE,... ...]")] = (
        "lr=0.5,1,2,4",
    )
    """The values to choose from, such as `lr=0.5,1,2 clip-norm=0.5,1 k=1,2`. Names: lr, clip-norm, clipping, optimizer,
    ema, method, model, augment, k, beta, gamma, outer-momentum, kappa; not accounted also batch-size, epochs, steps."""

    mode: str = "held-out"
    """held-out, accounted or unaccounted."""

    public_dataset: Annotated[str | None, shown_default("none, a share of the training records")] = None
    """held-out: dataset of public records for the trials, with the same labels. Nobody in it is protected."""

    share: float = 0.2
    """held-out: share of the training records for the trials. The final run uses the others."""

    mean_trials: float = 10.0
    """accounted: mean number of trials. More trials cost more epsilon."""

    distribution: str = "geometric"
    """accounted: distribution of the number of trials. logarithmic costs least and often runs one trial; poisson runs
    close to the mean, costs most for many trials, and may run none."""

    judged: float = 0.2
    """Fraction of a trial's records on which it is scored. They are not protected."""

    final_holdout: Annotated[float | None, shown_default("none, the test split")] = None
    """Evaluate the final run on this fraction of its records. Not with --mode accounted, whose result is the best
    trial."""

    jobs: int = 1
    """Number of trials at a time. They share the cores."""

    out: Annotated[Path | None, shown_default("runs/<date>-<time>-<dataset>-<model>-tuning")] = None
    """Folder for trials, table, picture and the model in the folder `best`."""

    resume: Annotated[Path | None, shown_default("none", "FOLDER")] = None
    """Go on with the tuning in this folder, which holds all its settings except --data-dir and --jobs."""

    data_dir: Annotated[Path | None, shown_default("$PMLF_DATA, else the Hugging Face hub")] = None
    """Folder of datasets with the layout of the Hugging Face hub."""

    def execute(self) -> int:
        from pmlf.cli.batch_display import batch_progress
        from pmlf.cli.run_display import train_progress
        from pmlf.experiments import executors
        from pmlf.tuning import outcome, tuner

        plan, out = self._stored(self.resume) if self.resume is not None else self._new()
        console = Console(stderr=True)
        if plan.mode == "accounted":
            say("the number of trials and all but the best stay secret: nothing is shown until the end")
        with (
            batch_progress(console, "trials") as listener,
            train_progress(Console(stderr=True, quiet=True)) as observer,
        ):
            execute = executors.executor("local", self.jobs)
            result = tuner.tune(plan, out, execute, listener, data_dir=self.data_dir, observer=observer)
        if result.trials:
            outcome.write_csv(result, out / outcome.CSV)
            outcome.plot(result, out / outcome.PICTURE)
        self.show(result.to_json(), *([_table(result)] if result.trials else []), facts(_facts(result, plan, out)))
        return 0

    def _new(self) -> tuple[TuningPlan, Path]:
        from pmlf.mechanism.selection import Selection
        from pmlf.tuning import Grid, TuningPlan

        plan = TuningPlan(
            base=RunSpec(method=self.method, **vars(self.setting)),
            grid=Grid.parsed(self.grid),
            mode=self.mode,
            public_dataset=self.public_dataset,
            share=self.share,
            selection=Selection(mean=self.mean_trials, distribution=self.distribution),
            judged=self.judged,
            final_holdout=self.final_holdout,
        )
        return plan, self.out or dated_folder(f"{self.setting.title}-tuning")

    def _stored(self, folder: Path) -> tuple[TuningPlan, Path]:
        from pmlf.tuning.plan import stored_plan
        from pmlf.tuning.tuner import PLAN

        if replace(self, resume=None, jobs=1, data_dir=None, json=False) != Tune():
            raise ValueError(
                f"--resume {folder} has all settings of the tuning: give only --jobs and --data-dir beside it"
            )
        path = folder / PLAN
        if not path.is_file():
            raise ValueError(f"{str(folder)!r} is not the folder of a tuning: it has no {PLAN}")
        return stored_plan(folder, json.loads(path.read_text())), folder


def _table(result: TuningResult) -> Table:
    trials = result.ranked
    table = Table(*trials[0].candidate, result.metric, box=SIMPLE_HEAD, pad_edge=False)
    for trial in trials:
        shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in trial.candidate.values()]
        table.add_row(*shown, _score(trial))
    return table


def _score(trial: TriedCandidate) -> str:
    """An accuracy with its interval; the number itself for R2 and perplexities."""
    if "accuracy_low" not in trial.numbers:
        return f"{trial.score:.4g}"
    low, high = trial.numbers["accuracy_low"], trial.numbers["accuracy_high"]
    return f"{100 * trial.score:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _facts(result: TuningResult, plan: TuningPlan, out: Path) -> list[tuple[str, str]]:
    from pmlf.tuning.grid import in_words

    if result.best is None:
        return [("best", "none: no trial was drawn"), ("epsilon", f"{result.epsilon:.4g} is spent all the same")]
    found = [("best", in_words(result.best)), ("model", str(result.out))]
    epsilon = "none" if result.epsilon is None else f"{result.epsilon:.4g}"
    cost = {
        "held-out": "for the records of the final run, which no trial has seen",
        "accounted": "for all trials together",
        "unaccounted": "of the final run alone: the trials on the same records are not accounted for",
    }
    found.append(("epsilon", f"{epsilon} {cost[result.mode]}"))
    if result.tuning_epsilon is not None:
        share = f"{100 * plan.share:g} % of the records"
        found.append(("of the trials", f"{result.tuning_epsilon:.4g} for the {share} that they saw"))
    return [*found, ("written to", str(out))]
