"""Audit of steps that two processes take together, and of two ways to take them that are broken.

    python benchmarks/audit_processes.py --out docs/results/audit-processes.json

Canaries as in `pmlf.audit`: each moves the sum along its own coordinate, and takes part by a fair coin. All that take
part are in every step (q = 1), half of them on each rank. The claim is epsilon 4 at delta 1e-5 for 4 steps, which is
mu-GDP with mu = 0.93. A broken variant has mu times sqrt(2) or 2. Of n canaries that are seen, the bound on mu loses
about 13 / sqrt(n) to confidence (0.9999): 0.12 of 12,000, 0.17 of the 6,000 of one rank, so both can be refuted. At
epsilon 1, mu = 0.27, 2,000 canaries lose 0.3, more than either variant adds.

together: as the library does it.
shares of noise: each rank adds noise of sigma / sqrt(2) to its own sum, and its copy of it is seen (a filter's memory).
draws by itself: every rank draws from all records, so a record is in both ranks' sums.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import secrets
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pmlf import methods
from pmlf.audit import bounds
from pmlf.audit.canaries import CanaryDataset, coins, gradient, linear_loss, linear_model, without_filter
from pmlf.mechanism import accounting
from pmlf.mechanism.noise import SeededRandomness
from pmlf.parallel.processes import OneProcess
from pmlf.step import PrivateStep

EPSILON, DELTA, STEPS, CANARIES, CONFIDENCE, TOGETHER = 4.0, 1e-5, 4, 12000, 0.9999, 250
VARIANTS = ("together", "shares of noise", "draws by itself")


def scores(variant: str, included: Any, rank: int, noise_multiplier: float, method: str) -> Any:
    """Each canary's coordinate of the released sums, added over the steps, as rank 0 sees them."""
    dataset, model = CanaryDataset(included), linear_model(len(included))
    drawn = np.array([dataset[place] for place in range(len(dataset))])
    own = drawn if variant == "draws by itself" else drawn[drawn % 2 == rank]
    alone = variant == "shares of noise"
    step = PrivateStep(
        model,
        linear_loss,
        method=method,
        noise_multiplier=noise_multiplier / math.sqrt(2) if alone else noise_multiplier,
        expected_batch_size=len(dataset),
        group=OneProcess() if alone else "auto",
        assume_independent_samples=True,
    )
    optimizer, released = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(STEPS):
        for start in range(0, len(own), TOGETHER):
            step.accumulate(dataset.collate(own[start : start + TOGETHER].tolist()))
        step.release()
        released.append(gradient(model))
        optimizer.step()
    return len(dataset) * without_filter(methods.resolve(method).low_pass, released).sum(0)


def audited(variant: str, rank: int, seed: int, noise_multiplier: float, method: str) -> dict[str, Any]:
    """The bounds on mu and epsilon from one run of a variant."""
    included = coins(SeededRandomness(seed), CANARIES)
    found = scores(variant, included, rank, noise_multiplier, method)
    seen = np.arange(CANARIES) % 2 == 0 if variant == "shares of noise" else np.ones(CANARIES, dtype=bool)
    mu = bounds.gaussian_mu(found[seen & included], found[seen & ~included], CONFIDENCE)
    epsilon = bounds.gaussian_epsilon(mu, DELTA)
    return {"variant": variant, "method": method, "mu": mu, "epsilon": epsilon, "refuted": epsilon > EPSILON}


def one_rank(rank: int, folder: str, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    z = accounting.noise_multiplier(target_epsilon=EPSILON, target_delta=DELTA, sample_rate=1.0, steps=STEPS)
    os.environ["WORLD_SIZE"] = "1"
    cases = [(variant, method) for variant in VARIANTS for method in ("dpsgd", "dp-pmlf")]
    found = [audited(variant, rank, seed + i, z, method) for i, (variant, method) in enumerate(cases)]
    dist.destroy_process_group()
    if rank == 0:
        claim = {"epsilon": EPSILON, "delta": DELTA, "steps": STEPS, "mu": math.sqrt(STEPS) / z}
        document = {
            "claim": claim,
            "canaries": CANARIES,
            "confidence": CONFIDENCE,
            "noise_multiplier": z,
            "runs": found,
        }
        (Path(folder) / "found.json").write_text(json.dumps(document, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context, seed = multiprocessing.get_context("spawn"), secrets.randbits(62)
        started = [context.Process(target=one_rank, args=(rank, folder, seed)) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        written = (Path(folder) / "found.json").read_text()
    print(written)
    if given.out is not None:
        given.out.write_text(written)


if __name__ == "__main__":
    main()
