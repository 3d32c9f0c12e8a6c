"""Two processes of one thread against one process of one thread: samples a second, turn by turn.

    python benchmarks/scaling.py --turns 5 --out docs/results/scaling.json

CNN-5 on 28x28 images and a small transformer on 64 tokens, DP-PMLF, B = 512, micro-batches of 64. Each turn runs one
process, then two, in fresh processes; the ratio of a turn compares neighbours in time. Wanted: a median of at least
1.8. It needs two cores that nobody else uses. `release` is the share of a step for sums, noise and filter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import pmlf
from pmlf import models
from pmlf.mechanism.sampling import LogicalBatch

BATCH, TOGETHER, TOKENS, WIDTH = 512, 64, 64, 128


class SmallTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.layers(self.words(tokens)).mean(1)))


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "cnn5":
        return models.build("cnn5", in_channels=1, image_size=28, classes=10, seed=0), torch.randn(4 * BATCH, 1, 28, 28)
    return SmallTransformer(), torch.randint(0, 1000, (4 * BATCH, TOKENS))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def measured(name: str, steps: int) -> dict[str, float]:
    """Samples a second over some steps after the first, and the share of their time in `release`."""
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    model, inputs = case(name)
    run = pmlf.make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        dataset=TensorDataset(inputs, torch.arange(len(inputs)) % 10),
        loss_fn=losses,
        noise_multiplier=1.0,
        target_delta=1e-5,
        batch_size=BATCH,
        steps=steps + 1,
        max_physical_batch_size=TOGETHER,
        seed=0,
    )
    releasing, release = [0.0], run.private_step.release

    def timed(batch: LogicalBatch | None = None) -> None:
        begin = time.perf_counter()
        release(batch)
        releasing[0] += time.perf_counter() - begin

    run.private_step.release = timed  # type: ignore[method-assign]
    begin = 0.0
    for batch in run.batches():
        run.step(batch)
        if run.steps_done == 1:  # the first one has the checks
            begin, releasing[0] = time.perf_counter(), 0.0
    seconds = time.perf_counter() - begin
    return {"rank": run.processes.rank, "samples a second": steps * BATCH / seconds, "release": releasing[0] / seconds}


def started(name: str, steps: int, processes: int) -> dict[str, float]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, __file__, "--child", name, "--steps", str(steps)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(next(line for line in shown.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        found = measured(given.child, given.steps)
        if found["rank"] == 0:  # two processes that print at once may share a line
            print(json.dumps(found), flush=True)
        return
    document: dict[str, Any] = {"torch": torch.__version__, "steps": given.steps}
    for name in ("cnn5", "transformer"):
        turns = [{count: started(name, given.steps, count) for count in (1, 2)} for _ in range(given.turns)]
        ratios = [turn[2]["samples a second"] / turn[1]["samples a second"] for turn in turns]
        document[name] = {"turns": turns, "ratios": ratios, "median": statistics.median(ratios)}
    written = json.dumps(document, indent=2) + "\n"
    print(written)
    if given.out is not None:
        given.out.write_text(written)


if __name__ == "__main__":
    main()
