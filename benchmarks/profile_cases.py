"""Where the time of a private gradient goes beyond a plain one's: torch operations of both, case by case.

    python benchmarks/profile_cases.py --out docs/results/profile.json

One thread, half of each case's batch (`pmlf bench` has the whole ones); the profiler's own cost is in the times, so
only the shares mean something. `extra` is an operation's time at k=1 less its time in a plain gradient, over the whole
plain one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pmlf import machine
from pmlf.bench import cases, contenders

ROUNDS, SHOWN = 3, 8
PLAIN = {"cnn5": "plain-channels-last", "resnet18": "plain-channels-last"}


def operations(case: str, contender: str, scale: float) -> dict[str, float]:
    """Milliseconds of every operation, in the fastest of some rounds."""
    model, batch = cases.find(case).prepare(scale)
    runner = contenders.find(contender).prepare(model, batch, 1)
    best: dict[str, float] = {}
    for number in range(ROUNDS + 1):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            runner.gradient()
        if runner.release is not None:
            runner.release()
        runner.clear()
        found = {event.key: event.self_cpu_time_total / 1e3 for event in profiler.key_averages()}
        if number and (not best or sum(found.values()) < sum(best.values())):
            best = found
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(cases.CASES), help="some of the cases of pmlf bench")
    parser.add_argument("--scale", type=float, default=0.5, help="factor on the batch sizes")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    machine.keep_freed_memory()
    torch.set_num_threads(1)
    document = []
    for case in arguments.cases:
        plain = operations(case, PLAIN.get(case, "plain"), arguments.scale)
        private = operations(case, "pmlf-k1", arguments.scale)
        whole = sum(plain.values())
        extra = {name: (private.get(name, 0.0) - plain.get(name, 0.0)) / whole for name in {*plain, *private}}
        ranked = sorted(extra, key=lambda name: abs(extra[name]), reverse=True)[:SHOWN]
        ratio = sum(private.values()) / whole
        document.append(
            {
                "case": case,
                "plain_ms": round(whole, 2),
                "ratio_under_the_profiler": round(ratio, 3),
                "extra": {name: round(extra[name], 3) for name in ranked},
            }
        )
        print(f"{case}: plain {whole:.1f} ms, k=1 {ratio:.2f} times that; of the difference, over plain:")
        for name in ranked:
            print(f"  {extra[name]:+.3f}  {name}")
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
