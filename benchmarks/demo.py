"""What shaped noise gains, in a few minutes and without a download: `make demo`.

    python benchmarks/demo.py                                        # five seeds of three methods at epsilon 8
    python benchmarks/demo.py --tune docs/results/demo-tuning.json   # where its learning rates come from

A linear model on features of the 12,000 Fashion-MNIST images in the package. The features come from synthetic images
alone (`random_features.py`). Declared before the runs: epsilon 8, delta 1e-5, batch size 250, 400 steps, clip norm 0.5,
the last iterate. The rate of every method is the best of one grid on 1,200 held-out training records, over two seeds
that the demo does not use. The demo trains on all 12,000 and shows its 2,000 test images, with 95 % intervals over its
five seeds. `docs/results/demo.txt` is its recorded output.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from scipy import stats
from torch import Tensor
from torch.utils.data import TensorDataset

import shaped_linear as linear
from pmlf import data, evaluate, make_private, methods
from random_features import Features

EPSILON, DELTA, BATCH, STEPS, CLIP, BANDS, EVERY = 8.0, 1e-5, 250, 400, 0.5, 8, 50
RATES = {"dpsgd": 60.0, "dp-pmlf": 150.0, "dp-pmlf-shaped": 150.0}  # docs/results/demo-tuning.json
GRID, TUNING_SEEDS, HELD_OUT = (20.0, 60.0, 150.0, 400.0), (1000, 1001), 1200
Splits = tuple[Tensor, Tensor, Tensor, Tensor]


def splits(advanced: Callable[[int], object] = lambda images: None) -> Splits:
    """Features and labels of the training and of the test images; `advanced` is called with numbers of images done."""
    images, features = data.load("fashion-mnist-small"), Features()

    def of(pixels: Tensor) -> Tensor:
        found = []
        for part in pixels.split(200):
            found.append(features(F.pad(part.float(), (2, 2, 2, 2)).expand(-1, 3, -1, -1)).float())
            advanced(len(part))
        return torch.cat(found)

    return of(images.train.images), images.train.labels, of(images.test.images), images.test.labels


def train(method: str, seed: int, records: Splits, advanced: Callable[[int], object]) -> list[float]:
    """Test accuracy in per cent after every 50 steps; `advanced` is called with numbers of steps done."""
    x, y, test_x, test_y = records
    model = torch.nn.Linear(x.shape[1], 10, bias=False)
    torch.nn.init.zeros_(model.weight)
    run = make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATES[method]),
        dataset=TensorDataset(x, y),
        loss_fn=torch.nn.CrossEntropyLoss(),
        method=methods.resolve(method),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        batch_size=BATCH,
        steps=STEPS,
        clip_norm=CLIP,
        seed=seed,
    )
    course = []
    for batch in run.batches():
        run.step(batch)
        advanced(1)
        if run.steps_done % EVERY == 0:
            course.append(100 * evaluate(model, TensorDataset(test_x, test_y), batch_size=2000))
    assert run.epsilon() <= EPSILON
    return course


def interval(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Means over the seeds (axis 0), and half the widths of their 95 % intervals (Student's t)."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(0, ddof=1) / math.sqrt(len(values))
    return values.mean(0), half


def plot(courses: dict[str, np.ndarray[Any, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes, steps = figure.subplots(), np.arange(EVERY, STEPS + 1, EVERY)
    for method, course in courses.items():
        mean, half = interval(course)
        (line,) = axes.plot(steps, mean, marker="o", label=f"{method} ({mean[-1]:.1f} %)")
        axes.fill_between(steps, mean - half, mean + half, color=line.get_color(), alpha=0.2, linewidth=0)
    seeds = len(next(iter(courses.values())))
    axes.set(
        title=f"Linear model on fixed features of Fashion-MNIST (12,000 images), epsilon {EPSILON:g}",
        xlabel="step",
        ylabel=f"test accuracy in %, mean of {seeds} seeds with its 95 % interval",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def demo(seeds: int, picture: Path) -> None:
    began = time.monotonic()
    print(f"{', '.join(RATES)}: a linear model of 12,000 images at epsilon {EPSILON:g}, {seeds} seeds each.")
    print("One to five minutes on two cores.\n", flush=True)
    courses: dict[str, list[list[float]]] = {method: [] for method in RATES}
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        images = progress.add_task("features of images", total=14_000)
        steps = progress.add_task("private steps", total=seeds * len(RATES) * STEPS)
        records = splits(partial(progress.advance, images))
        print(f"features of 14,000 images: {time.monotonic() - began:.0f} s", flush=True)
        for seed in range(seeds):
            for method, found in courses.items():
                found.append(train(method, seed, records, partial(progress.advance, steps)))
                print(f"seed {seed}  {method:15} test accuracy {found[-1][-1]:.1f} %", flush=True)
    arrays = {method: np.array(found) for method, found in courses.items()}
    print(f"\ntest accuracy of the last iterate at epsilon {EPSILON:g}, delta {DELTA:g}; {seeds} seeds, 95 % intervals")
    for method, course in arrays.items():
        mean, half = interval(course)
        line = f"{method:15} rate {RATES[method]:3g}   {mean[-1]:.2f} ± {half[-1]:.2f} %"
        for other in list(arrays)[: list(arrays).index(method)]:
            gain, width = interval((course - arrays[other])[:, -1])
            line += f"   {gain:+.2f} ± {width:.2f} over {other}"
        print(line)
    plot(arrays, picture)
    print(f"\nAll three share epsilon, initial weights and the grid of their tuning. picture: {picture}")
    print(f"{time.monotonic() - began:.0f} s in all")


def tune(out: Path) -> None:
    """All rates and methods with the same draws in one product, by `shaped_linear`."""
    linear.BATCH, linear.STEPS, linear.CLIP, linear.HELD_OUT = BATCH, STEPS, CLIP, HELD_OUT
    linear.WHITE = ("dpsgd", "dp-pmlf")
    x, y, _, _ = splits()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(y)))
    held, kept = order[:HELD_OUT], order[HELD_OUT:]
    judged = x[kept], y[kept], x[held], y[held]
    found: dict[str, dict[str, list[float]]] = {}
    for cycle in (1, BANDS):
        family = linear.methods_of(cycle)
        for seed in TUNING_SEEDS:
            accuracies = linear.train(cycle, EPSILON, seed, dict.fromkeys(family, GRID), judged, STEPS)[0]["accuracy"]
            for name, by_rate in accuracies.items():
                for rate, accuracy in by_rate.items():
                    method = name.removesuffix(f"-{BANDS}")
                    found.setdefault(method, {}).setdefault(rate, []).append(accuracy["last"])
    chosen = {
        method: float(max(rates, key=lambda rate: float(np.mean(rates[rate])))) for method, rates in found.items()
    }
    out.write_text(json.dumps({"setting": __doc__, "held_out_accuracy": found, "chosen": chosen}, indent=1) + "\n")
    print(chosen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("runs/demo.png"))
    parser.add_argument("--tune", type=Path, metavar="FILE", help="choose the rates, and write the trials to FILE")
    given = parser.parse_args()
    if given.tune is None:
        demo(given.seeds, given.picture)
    else:
        tune(given.tune)
