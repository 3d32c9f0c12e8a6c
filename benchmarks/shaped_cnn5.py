"""Shaped noise against white noise at the same epsilon: CNN-5 on CIFAR-10, trained by `make_private`.

    python benchmarks/shaped_cnn5.py run ../shared/data docs/results/shaped-cnn5.jsonl --minutes 40
    python benchmarks/shaped_cnn5.py report docs/results/shaped-cnn5.jsonl

Images are averaged to 16x16 pixels, and 20,000 training records are used: all of them at 32x32 pixels would take ten
times as long. Declared before the runs: expected batch size 1000, 160 steps (8 epochs), clip norm 0.1, delta 1e-5,
constant rate, SGD, no augmentation, epsilon 8, then 4; the last iterate and an exponential average with decay 0.97 are
both reported. The effective rate (rate times DC gain of the filter) of every method comes from one grid. It is the one
with the best mean of the two accuracies on 5,000 other training records, with a seed that the final runs do not use;
trials are otherwise final runs. The grid was extended to 15 before any final run, since a best rate was at that end of
(30, 60, 120). At epsilon 8 that of shaped noise is the last of the grid, which is at most to its disadvantage. Methods
with momentum cost twice as much and have no trials of their own: they take the rate of the method that differs from
them by the momentum alone. Five final seeds, judged on the test split, paired between methods: a seed gives the initial
weights, the draws and the noise. "shaped" has the number of bands that `pmlf.shapes.best` chooses for the epsilon, and
is drawn cyclically.

Declared after the final runs at epsilon 8 had been seen, and before any other: a second rule, by which the last iterate
and the average have a rate each, the one with the best accuracy of their own in the same trials. Both are reported.

One line is written for a finished job, and a job with a line is not run again. A job that `--minutes` interrupts leaves
its checkpoint beside the lines and goes on with the same bits in the next call. Several calls may run at once: a job is
locked by the process that runs it. The order of the jobs: the whole grid at epsilon 8, its middle first; then one seed
after the other over all methods but InnerOuter; then InnerOuter; then what the second rule adds; then epsilon 4 in the
same way.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from pmlf import checkpoint, data, evaluate, machine, make_private, methods, models
from pmlf.methods import Method
from pmlf.shapes import best

RECORDS, BATCH, STEPS, CLIP, DELTA, DECAY = 20_000, 1000, 160, 0.1, 1e-5, 0.97
EPSILONS = (8.0, 4.0)
GRID = (60.0, 30.0, 15.0, 120.0)
SIZE, LOADED = 16, 2500  # pixels; images read at a time
HELD_OUT, TUNING_SEED, SEEDS = 5000, 1000, (0, 1, 2, 3, 4)
METRICS = ("last", "average")
ONE_RATE, OWN_RATES = (METRICS,), tuple((metric,) for metric in METRICS)  # a rate for each group of accuracies
FIRST, LAST = ("dp-pmlf-shaped", "dpsgd", "lp-dpsgd", "dp-pmlf"), ("inner-outer",)
OURS = "dp-pmlf-shaped"
TUNED = ("dpsgd", "lp-dpsgd", "lp-dpsgd-shaped")
TUNED_AS = {"dp-pmlf": "lp-dpsgd", "dp-pmlf-shaped": "lp-dpsgd-shaped", "inner-outer": "dpsgd"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run."""

    purpose: str
    epsilon: float
    method: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.purpose}-{self.epsilon:g}-{self.method}-{self.rate:g}-{self.seed}"


def bands(epsilon: float) -> int:
    return best(records=RECORDS, batch_size=BATCH, steps=STEPS, epsilon=epsilon, delta=DELTA).shape.bands


def method_of(job: Job) -> Method:
    if job.method.endswith("-shaped"):
        return methods.PRESETS[job.method](bands=bands(job.epsilon))
    return methods.resolve(job.method)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def scores(out: Path, **wanted: Any) -> dict[tuple[float, int], dict[str, float]]:
    """The accuracies of finished jobs, by rate and seed."""
    found = (line for line in lines(out) if all(line[name] == value for name, value in wanted.items()))
    return {(line["rate"], line["seed"]): line["accuracy"] for line in found}


def jobs(out: Path) -> Iterator[Job]:
    """The jobs known so far, in an order in which every prefix is useful. Final jobs follow from what tuning wrote."""
    for epsilon in EPSILONS:
        for rate in GRID:
            for method in TUNED:
                yield Job(purpose="tuning", epsilon=epsilon, method=method, rate=rate, seed=TUNING_SEED)
        if sum(line["purpose"] == "tuning" and line["epsilon"] == epsilon for line in lines(out)) < len(GRID) * len(
            TUNED
        ):
            return
        for metrics in ONE_RATE + OWN_RATES:
            for methods_of_turn in (FIRST, LAST):
                for seed in SEEDS:
                    for method in methods_of_turn:
                        rate = chosen_rate(out, method, epsilon, metrics)
                        yield Job(purpose="final", epsilon=epsilon, method=method, rate=rate, seed=seed)


def chosen_rate(out: Path, method: str, epsilon: float, metrics: Sequence[str]) -> float:
    """The effective rate with the best mean of some accuracies on the held-out records."""
    trials = scores(out, purpose="tuning", epsilon=epsilon, method=TUNED_AS.get(method, method))
    return max(GRID, key=lambda rate: sum(trials[rate, TUNING_SEED][metric] for metric in metrics))


@cache
def small(data_dir: str) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test split, averaged to small images."""
    found = data.load("cifar10", data_dir)
    splits = []
    for records in (found.train, found.test):
        images, classes = list[Tensor](), list[Tensor]()
        for start in range(0, len(records), LOADED):
            some = data.collate([records[index] for index in range(start, min(start + LOADED, len(records)))])
            images.append(torch.nn.functional.adaptive_avg_pool2d(some[0], SIZE))
            classes.append(some[1])
        splits.append(TensorDataset(torch.cat(images), torch.cat(classes)))
    return splits[0], splits[1]


def split(data_dir: str, purpose: str) -> tuple[Any, Any]:
    """The records that are trained on, and those that are judged."""
    training, test = small(data_dir)
    order = np.random.default_rng(0).permutation(len(training)).tolist()
    trained_on = Subset(training, order[:RECORDS])
    return trained_on, test if purpose == "final" else Subset(training, order[RECORDS : RECORDS + HELD_OUT])


def train(job: Job, data_dir: str, saved: Path, deadline: float) -> dict[str, Any] | None:
    """The record of a job; None if it ran out of time and left its state."""
    training, judged = split(data_dir, job.purpose)
    method = method_of(job)
    model = models.build("cnn5", in_channels=3, image_size=SIZE, classes=10, seed=job.seed)
    run = make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=job.rate / method.low_pass.dc_gain),
        dataset=training,
        loss_fn=torch.nn.CrossEntropyLoss(),
        method=method,
        target_epsilon=job.epsilon,
        target_delta=DELTA,
        batch_size=BATCH,
        steps=STEPS,
        clip_norm=CLIP,
        ema=DECAY,
        seed=job.seed,
        max_physical_batch_size=250,
    )
    before = 0.0
    if saved.exists():
        state = checkpoint.load(saved)
        before = state.pop("processor_seconds")
        run.load_state_dict(state)
    started = time.process_time()
    for batch in run.batches():
        run.step(batch)
        if time.monotonic() > deadline and run.steps_done < STEPS:
            seconds = before + time.process_time() - started
            checkpoint.save(saved, run.state_dict() | {"processor_seconds": seconds})
            return None
    averaged = run.averaged_model()
    assert averaged is not None
    accuracy = {name: evaluate(judge, judged) for name, judge in zip(METRICS, (model, averaged), strict=True)}
    return asdict(job) | {
        "bands": method.noise.bands,
        "noise_multiplier": run.private_step.settings.noise_multiplier,
        "spent": run.epsilon(),
        "accuracy": accuracy,
        "processor_seconds": round(before + time.process_time() - started),
    }


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """True for the one process that holds the lock; the system gives it back when the process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        path.unlink()


def measure(data_dir: str, out: Path, minutes: float) -> None:
    """Run job after job until all are done or time is up."""
    torch.set_num_threads(1)
    machine.keep_freed_memory()
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        open_jobs = [job for job in jobs(out) if not done(out, job)]
        if not open_jobs:
            return
        if not any(attempt(job, data_dir, out, deadline) for job in open_jobs):
            time.sleep(5)  # what is left runs elsewhere


def done(out: Path, job: Job) -> bool:
    return any(all(line[name] == value for name, value in asdict(job).items()) for line in lines(out))


def attempt(job: Job, data_dir: str, out: Path, deadline: float) -> bool:
    """Run a job unless another process has it or has just ended it."""
    with locked(out.with_name(f"{out.stem}-{job.name}.lock")) as mine:
        if not mine or done(out, job):
            return False
        saved = out.with_name(f"{out.stem}-{job.name}.safetensors")
        record = train(job, data_dir, saved, deadline)
        if record is None:
            print(f"{job.name}: out of time, goes on from {saved.name}", flush=True)
            return True
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        saved.unlink(missing_ok=True)
        print(job.name, record["accuracy"], flush=True)
        return True


def report(out: Path) -> None:
    """The trials, and by both rules the means of the final runs and the paired gains of shaped DP-PMLF."""
    for epsilon in EPSILONS:
        trials = {method: scores(out, purpose="tuning", epsilon=epsilon, method=method) for method in TUNED}
        for method, found in trials.items():
            for (rate, _), accuracy in found.items():
                print(f"epsilon {epsilon:g}  tuning  {method:16} rate {rate:3g}", accuracy)
        if all(len(found) == len(GRID) for found in trials.values()):
            for words, rule in (("one rate", ONE_RATE), ("own rates", OWN_RATES)):
                for metrics in rule:
                    for metric in metrics:
                        report_finals(out, epsilon, metrics, metric, words)


def report_finals(out: Path, epsilon: float, metrics: Sequence[str], metric: str, rule: str) -> None:
    """Means over the seeds that shaped DP-PMLF has too, and its paired gains with 95 % intervals."""
    finals = {}
    for method in FIRST + LAST:
        rate = chosen_rate(out, method, epsilon, metrics)
        found = scores(out, purpose="final", epsilon=epsilon, method=method, rate=rate)
        finals[method] = {seed: 100 * accuracy[metric] for (_, seed), accuracy in found.items()}
    for method, its in finals.items():
        seeds = sorted(set(its) & set(finals[OURS]))
        if not seeds:
            continue
        rate = chosen_rate(out, method, epsilon, metrics)
        words = f"epsilon {epsilon:g}  {rule:9}  {metric:8} {method:16} rate {rate:3g} "
        words += f"{np.mean([its[seed] for seed in seeds]):.2f} of {len(seeds)} seeds"
        if method != OURS and len(seeds) > 1:
            gain = np.array([finals[OURS][seed] - its[seed] for seed in seeds])
            half = stats.t.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / math.sqrt(len(gain))
            words += f", shaped dp-pmlf gains {gain.mean():.2f} +- {half:.2f}"
        print(words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("data_dir")
    running.add_argument("out", type=Path)
    running.add_argument("--minutes", type=float, default=40.0)
    commands.add_parser("report").add_argument("out", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "run":
        measure(chosen.data_dir, chosen.out, chosen.minutes)
    else:
        report(chosen.out)
