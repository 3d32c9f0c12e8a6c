"""What data costs: the first start (decoding), the second (cached), and the Poisson draw of 1,000 images beside a step.

python benchmarks/data_cost.py --data-dir DATA      # CIFAR-10 laid out as the hub lays it out; prints JSON
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from pmlf import PrivateStep, data, models
from pmlf.mechanism.noise import SeededRandomness
from pmlf.mechanism.sampling import PoissonBatches

Batch = tuple[torch.Tensor, torch.Tensor]
BATCH = 1000
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    folder = parser.parse_args().data_dir
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PMLF_CACHE"] = cache
        first, second = (seconds(lambda: data.load("cifar10", folder)) for _ in range(2))
        loaded = data.load("cifar10", folder)
        sampler = PoissonBatches(
            loaded.train, expected_batch_size=BATCH, randomness=SeededRandomness(0), collate_fn=data.collate
        )

        def drawn(number: int) -> list[Batch]:
            return list(next(sampler.batches(number, number + 1)))

        draws = [seconds(partial(drawn, number)) for number in range(ROUNDS)]
        model = models.build("cnn5", in_channels=3, image_size=32, classes=10, seed=0)
        step = PrivateStep(
            model,
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
            noise_multiplier=1.0,
            expected_batch_size=BATCH,
        )
        steps = [seconds(partial(take, step, drawn(number))) for number in range(ROUNDS)]
    result = {
        "first_start_seconds": round(first, 2),
        "second_start_seconds": round(second, 2),
        "draw_ms": round(1000 * min(draws), 2),
        "step_ms": round(1000 * min(steps[1:]), 1),  # the first has one point, and the checks
        "draw_share_of_step": round(min(draws) / min(steps[1:]), 5),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=2))


def take(step: PrivateStep, micro_batches: list[Batch]) -> None:
    for micro_batch in micro_batches:
        step.accumulate(micro_batch)
    step.release()


if __name__ == "__main__":
    main()
