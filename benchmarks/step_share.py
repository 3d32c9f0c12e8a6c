"""How much of a whole training step is gradient work: DP-PMLF (k=2), CNN-5, B=1000, images of CIFAR-10's shape.

    python benchmarks/step_share.py --out docs/results/step-share.json

A real run through the runner (Poisson draws, loading, noise, filter, optimizer, ledger, checkpoints by the minute,
progress on a terminal), on records that are random numbers. What is not inside `PrivateStep.accumulate` is the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from pmlf import models
from pmlf.cli.run_display import train_progress
from pmlf.data import IMAGE_DATASETS, ImageDataset, ImageForm
from pmlf.data import collate as collate_images
from pmlf.experiments import runner, tasks
from pmlf.experiments.form import ModelForm
from pmlf.experiments.spec import RunSpec
from pmlf.step import PrivateStep

RECORDS, BATCH = 50_000, 1000


class Clock:
    """Time inside `accumulate` of each step, and of whole steps, from the end of one to the end of the next."""

    def __init__(self, observer: Any) -> None:
        self.inside, self.ended = 0.0, 0.0
        self.gradients: list[float] = []
        self.steps: list[float] = []
        self.observer = observer

    def started(self, spec: RunSpec, steps: int) -> None:
        self.observer.started(spec, steps)
        self.ended = time.perf_counter()

    def stepped(self, step: int, training_loss: float | None) -> None:
        self.observer.stepped(step, training_loss)
        now = time.perf_counter()
        self.steps.append(now - self.ended)
        self.gradients.append(self.inside)
        self.ended, self.inside = now, 0.0

    def evaluated(self, evaluation: Any) -> None:
        self.observer.evaluated(evaluation)
        self.ended = time.perf_counter()


def images(count: int) -> ImageDataset:
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    return ImageDataset(pixels, torch.randint(10, (count,)), mean=[0.5] * 3, std=[0.25] * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of the run, of which the first is a warm-up")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    def random_task(spec: RunSpec, data_dir: Path | None) -> tasks.Task:
        return tasks.Task(
            model=models.build("cnn5", in_channels=3, image_size=32, classes=10, seed=0),
            train=images(RECORDS),
            judged_on={"test": images(100)},
            form=ModelForm(
                model="cnn5",
                inputs=ImageForm(channels=3, size=32, mean=(0.5,) * 3, std=(0.25,) * 3),
                target=IMAGE_DATASETS["cifar10"].target,
            ),
            collate_fn=collate_images,
        )

    spec = RunSpec(method="dp-pmlf", model="cnn5", batch_size=BATCH, steps=arguments.steps, noise_multiplier=1.0)
    accumulate = PrivateStep.accumulate
    with train_progress(Console(stderr=True)) as observer, tempfile.TemporaryDirectory() as folder:
        clock = Clock(observer)

        def timed(self: PrivateStep, micro_batch: Any, **options: Any) -> None:
            begin = time.perf_counter()
            accumulate(self, micro_batch, **options)
            clock.inside += time.perf_counter() - begin

        with (
            mock.patch.object(PrivateStep, "accumulate", timed),
            mock.patch.object(runner.tasks, "prepare", random_task),
        ):
            runner.run(spec, Path(folder) / "run", observer=clock)
    shares = [inside / whole for inside, whole in zip(clock.gradients[1:], clock.steps[1:], strict=True)]
    document = {
        "gradient_share": sum(clock.gradients[1:]) / sum(clock.steps[1:]),
        "gradient_share_of_each_step": [round(share, 4) for share in shares],
        "seconds_a_step": sum(clock.steps[1:]) / len(shares),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    print(json.dumps(document, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
