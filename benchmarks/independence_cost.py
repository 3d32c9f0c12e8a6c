"""What the proof of independence and the watch cost, beside the step that they look at.

    python benchmarks/independence_cost.py --threads 2 --out docs/results/independence-cost.json

A step of B = 1000 expected samples is its micro-batches and one release. With the watch one of its samples, on average,
runs again alone. Steps with and without it run in turns on one model; the share is of medians, and of the time that
is spent inside the watch, which noise between steps does not move. RoBERTa-base's step is 1000 samples in size too, but
only so many of its micro-batches run as `--micro-batches` says, each of them watched: the watch's time in a whole step,
in which one sample is watched on average, is compared with the time of a micro-batch times their number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pmlf import PrivateStep, machine
from pmlf.bench.case import losses
from pmlf.bench.cases import CASES
from pmlf.checks.first_look import FirstLook, proof
from pmlf.checks.watch import Watch

EXPECTED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7, help="steps of each kind, in turns")
    parser.add_argument("--micro-batches", type=int, default=6, help="of RoBERTa-base, of each kind")
    parser.add_argument("--cases", nargs="+", default=["cnn5", "roberta"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore", message="noise_multiplier=0")
    found = {name: measured(name, given.turns if name != "roberta" else given.micro_batches) for name in given.cases}
    text = json.dumps({"machine": machine.describe(), "threads": given.threads, "cases": found}, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


def measured(name: str, turns: int) -> dict[str, Any]:
    case = CASES[name]
    model, batch = case.prepare()
    whole = name != "roberta"
    steps = {watched: step_of(model, watched=watched) for watched in (False, True)}
    proofs = [timed(lambda: proof(steps[True]._subject, batch)) for _ in range(2)]
    times: dict[bool, list[float]] = {False: [], True: []}
    inside: list[float] = []
    compared = Watch.compare

    def clocked(self: Watch, *args: Any, **named: Any) -> None:
        inside.append(timed(lambda: compared(self, *args, **named)))

    per_step = case.micro_batches if whole else 1
    with mock.patch.object(Watch, "compare", clocked), mock.patch.object(FirstLook, "at", lambda *_: "their own"):
        for step in steps.values():
            run(step, batch, per_step)
        inside.clear()
        for _ in range(turns):
            for watched, step in steps.items():
                if step._passes.watch is not None and not whole:  # a form that is new is always watched
                    step._passes.watch._seen.clear()
                times[watched].append(timed(lambda step=step: run(step, batch, per_step)))
    plain, with_watch = statistics.median(times[False]), statistics.median(times[True])
    of_a_step = plain * EXPECTED / (per_step * len(batch[1]))
    watched_passes = max(1, len(inside))
    expected_passes = EXPECTED / len(batch[1]) * (1 - (1 - 1 / EXPECTED) ** len(batch[1]))
    return {
        "first_proof_seconds": proofs[0],
        "second_proof_seconds": proofs[1],
        "step_seconds": of_a_step,
        "share_by_medians": with_watch / plain - 1,
        "watched_passes": len(inside),
        "seconds_of_a_watched_pass": sum(inside) / watched_passes,
        "share_inside_the_watch": expected_passes * sum(inside) / watched_passes / of_a_step,
    }


def step_of(model: torch.nn.Module, *, watched: bool) -> PrivateStep:
    return PrivateStep(
        model, losses, noise_multiplier=0.0, expected_batch_size=EXPECTED, assume_independent_samples=not watched
    )


def run(step: PrivateStep, batch: Any, micro_batches: int) -> None:
    for _ in range(micro_batches):
        step.accumulate(batch)
    step.release()


def timed(action: Any) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
