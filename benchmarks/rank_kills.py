"""A run on several processes, one of which is killed again and again: do the others stop, and is the run still whole?

    python benchmarks/rank_kills.py --kills 30 > docs/results/rank-kills.json

A run on two or three processes (gloo) is killed by SIGKILL of one rank: before it accumulates, while it accumulates,
after the ledger's line, in the sum over ranks, or in the optimizer step. It resumes with one, two or three processes by
turns. Do the other ranks stop by themselves with a sentence? Did the ledger ever count fewer events than were released?
With a seed: are the final weights those of a single process that nobody killed, bit by bit?
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kills import Countdown, before, counted_in, die
from pmlf.engine.clipper import Clipper
from pmlf.evidence.budget import BudgetGuard
from pmlf.experiments import runner, tasks
from pmlf.experiments.spec import RunSpec
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.parallel import summing
from pmlf.parallel.failure import RankFailed
from pmlf.step import PrivateStep

RECORDS, BATCH, PIECE, CHECKPOINT_EVERY = 1200, 100, 25, 3
STEPS_A_KILL = 8
TIMEOUT = 60.0  # seconds, within which the other ranks must have stopped
LOST = "another of the"


def after_the_ledger_s_line(calls: int) -> None:
    """Rank 0 dies with the event on the disk and its word unsaid; another rank dies when it has heard it."""
    for name in ("spend", "mirror"):
        whole, countdown = getattr(BudgetGuard, name), Countdown(calls)

        def dying(*given: Any, whole: Any = whole, countdown: Countdown = countdown) -> Any:
            answer = whole(*given)
            if countdown.is_over():
                die()
            return answer

        setattr(BudgetGuard, name, dying)


MOMENTS: dict[str, Callable[[int], None]] = {
    "before accumulating": lambda calls: before(PrivateStep, "agreement", calls),
    "while accumulating": lambda calls: before(Clipper, "add", calls),
    "after the ledger's line": after_the_ledger_s_line,
    "in the sum over ranks": lambda calls: before(summing, "_shares", calls),
    "in the optimizer step": lambda calls: before(torch.optim.SGD, "step", calls),
}


def witnessed(path: Path) -> None:
    """A byte in a file for every gradient that this rank has released."""
    release = PrivateStep.release

    def noted(self: PrivateStep, batch: LogicalBatch | None = None) -> None:
        release(self, batch)
        with path.open("ab") as file:
            file.write(b".")

    PrivateStep.release = noted  # type: ignore[method-assign]


def take_part(spec: RunSpec, out: Path, folder: Path, rank: int, ranks: int) -> None:
    """One rank, in a process of its own: says in a file why it stopped."""
    witnessed(folder / f"released-{rank}")
    try:
        if ranks > 1:
            meeting = f"file://{folder}/meeting"
            patience = timedelta(seconds=TIMEOUT)
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=patience)
        runner.run(spec, out, resume=True, checkpoint_every=CHECKPOINT_EVERY)
    except RankFailed as error:
        (folder / f"said-{rank}").write_text(str(error))
        os._exit(3)
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def attempt(spec: RunSpec, out: Path, ranks: int, victim: int | None, moment: str, calls: int) -> dict[str, Any]:
    """Begin or resume on some ranks, to the end or to the kill. What became of them."""
    folder = Path(tempfile.mkdtemp(dir=out.parent))
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            if rank == victim:
                MOMENTS[moment](calls)
            take_part(spec, out, folder, rank, ranks)
        children.append(child)
    ended: dict[int, int] = {}
    slowest, killed_at = 0.0, None
    while len(ended) < ranks:
        child, status = os.wait()
        ended[children.index(child)] = os.waitstatus_to_exitcode(status)
        if killed_at is None:
            killed_at = time.monotonic()
        slowest = time.monotonic() - killed_at
    released = [path.stat().st_size for path in folder.glob("released-*")]
    return {
        "exit_codes": [ended[rank] for rank in range(ranks)],
        "said": [path.read_text() for path in folder.glob("said-*")],
        "released": max(released, default=0),
        "seconds_until_all_stopped": slowest,
    }


def torture(spec: RunSpec, out: Path, kills: int) -> dict[str, Any]:
    """Kill a rank so many times, then let the run end on one process."""
    moments: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    released, margins, slowest = 0, [], 0.0
    for number in range(kills):
        moment, ranks = list(MOMENTS)[number % len(MOMENTS)], 2 + number % 2
        victim = random.randrange(ranks)
        found = attempt(spec, out, ranks, victim, moment, random.randint(1, 4))
        others = [code for rank, code in enumerate(found["exit_codes"]) if rank != victim]
        if found["exit_codes"][victim] != -signal.SIGKILL or others != [3] * (ranks - 1):
            raise RuntimeError(f"kill {number} {moment}: the ranks ended with {found['exit_codes']}")
        if not all(said.startswith(LOST) for said in found["said"]):
            raise RuntimeError(f"kill {number} {moment}: the other ranks said {found['said']}")
        released += found["released"]
        margins.append(counted_in(out) - released)
        slowest = max(slowest, found["seconds_until_all_stopped"])
        moments[moment] += 1
        sizes[f"{ranks} processes"] += 1
    last = attempt(spec, out, 1 + kills % 3, None, "", 1)
    if set(last["exit_codes"]) != {0}:
        raise RuntimeError(f"the run could not be ended: {last['exit_codes']}")
    result = json.loads((out / "result.json").read_text())
    return {
        "kills": dict(moments),
        "on": dict(sizes),
        "ended_on": 1 + kills % 3,
        "steps": result["steps"],
        "planned_steps": result["planned_steps"],
        "gradients_released": released + last["released"],
        "events_in_the_ledger": counted_in(out),
        "least_events_beyond_released": min([*margins, counted_in(out) - released - last["released"]]),
        "most_seconds_until_all_stopped": round(slowest, 1),
        "epsilon": result["epsilon"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="of all runs together")
    parser.add_argument("--runs", nargs="+", default=["seeded", "unseeded"], help="which runs to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args()
    random.seed(given.seed)
    torch.set_num_threads(1)  # the children are forked: no thread may run yet
    each = given.kills // len(given.runs)
    spec = RunSpec(
        model="linear",
        records=RECORDS,
        batch_size=BATCH,
        steps=STEPS_A_KILL * each,
        epsilon=8.0,
        delta=1e-5,
        ema=0.9,
        seed=7,
        max_physical_batch_size=PIECE,
    )
    torch.optim.SGD(tasks.prepare(spec).model.parameters())  # what is imported and read here, no child has to
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {}
        for name in given.runs:
            whole, killed = (Path(folder) / name / each_run for each_run in ("whole", "killed"))
            whole.parent.mkdir()
            report[name] = torture(spec if name == "seeded" else replace(spec, seed=None), killed, each)
            if name == "seeded":
                del report[name]["least_events_beyond_released"]  # what is released again is the same event there
                attempt(spec, whole, 1, None, "", 1)
                report[name]["same_bits_as_one_process"] = all(
                    (whole / file).read_bytes() == (killed / file).read_bytes()
                    for file in ("model.safetensors", "model-ema.safetensors")
                )
    print(json.dumps({"target_epsilon": spec.epsilon, "timeout": TIMEOUT, **report}, indent=2))


if __name__ == "__main__":
    main()
