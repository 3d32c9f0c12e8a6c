"""The cost of a step of units over that of a step of records, on the same records: interleaved ratios on one thread.

    python benchmarks/units_cost.py                    # prints one JSON document

Units have 1 to 50 records. A step of units has the micro-batches that the sampler of units cuts, a step of records has
as many records in full ones. Times are of the processor, not of the clock.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmlf import PrivateStep, methods
from pmlf.mechanism.noise import Stream
from pmlf.mechanism.units import Units
from pmlf.models.cnn import CNN5
from pmlf.models.vit import ViT

ROUNDS, UNITS, MICRO = 9, 32, 256
CASES = {
    "cnn5": (lambda: CNN5(3, 10), (3, 32, 32)),
    "transformer": (
        lambda: ViT(image_size=32, patch=4, in_channels=3, width=128, depth=3, heads=4, classes=10),
        (3, 32, 32),
    ),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def measured(name: str, k: int) -> dict[str, Any]:
    make, shape = CASES[name]
    torch.manual_seed(0)
    sizes = np.random.default_rng(0).integers(1, 51, UNITS)
    units = Units(np.repeat(np.arange(UNITS), sizes), most=50)
    inputs, labels = torch.randn(int(sizes.sum()), *shape), torch.randint(10, (int(sizes.sum()),))
    chunks = units.micro_batches(units.brought(np.arange(UNITS), Stream(bytes(32))), MICRO, None)
    method = methods.dp_pmlf(k=k)
    steps = {
        which: PrivateStep(
            make(), loss, method=method, noise_multiplier=1.0, expected_batch_size=UNITS, units=which == "units"
        )
        for which in ("records", "units")
    }

    def take(which: str) -> float:
        step, begin = steps[which], time.process_time()  # of this process alone: others share the machine
        for chunk in chunks if which == "units" else np.array_split(np.concatenate(chunks), -(-len(inputs) // MICRO)):
            batch = inputs[torch.from_numpy(chunk)], labels[torch.from_numpy(chunk)]
            step.accumulate(batch, units=units.of(chunk) if which == "units" else None)
        step.release()
        return time.process_time() - begin

    for _ in range(k):
        for which in steps:  # the first steps look at the model and fill the history
            take(which)
    pairs = [(take("records"), take("units")) for _ in range(ROUNDS)]
    ratios = [of_units / of_records for of_records, of_units in pairs]
    return {
        "records": int(sizes.sum()),
        "micro_batches": len(chunks),
        "median_ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "seconds_of_records": round(min(pair[0] for pair in pairs), 3),
    }


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {f"{name}, k={k}": measured(name, k) for name in CASES for k in (1, 2)}
    print(json.dumps({"command": "python benchmarks/units_cost.py", "cases": found}, indent=1))


if __name__ == "__main__":
    main()
