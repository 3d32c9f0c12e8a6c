"""A run killed again and again, at every kind of moment, and resumed each time: what is left of its promises?

python benchmarks/kills.py --kills 50 > docs/results/kills.json
python benchmarks/kills.py --kills 50 --bands 4 > docs/results/kills-shaped.json

With a seed: are the final weights those of the run that nobody killed, bit by bit? Without one: did the ledger ever
count fewer events than were released, and did epsilon ever pass its target? The kills are SIGKILLs: most are sent by
the run to itself in the middle of a write, a step or a rename, the others from outside at a random time.

With shaped noise, every process must begin with an empty noise memory. The releases that the ledger has, of all groups,
are compared with those that happened; its events are those of the group that had most.
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
from pathlib import Path
from typing import Any

import torch

from pmlf.basics import files
from pmlf.evidence import ledger
from pmlf.experiments import runner, tasks
from pmlf.experiments.spec import MethodOptions, RunSpec
from pmlf.mechanism import accounting
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.step import PrivateStep

TARGET_EPSILON, DELTA, RECORDS, BATCH, CHECKPOINT_EVERY = 4.0, 1e-5, 2000, 20, 3
STEPS_A_KILL = 16  # twice what a quick machine does between two kills, so that none comes after the end


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Is over at the n-th call."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def is_over(self) -> bool:
        self._left -= 1
        return self._left == 0


def in_the_middle_of_a_ledger_line(calls: int) -> None:
    whole, countdown = os.write, Countdown(calls)

    def write(descriptor: int, content: bytes) -> int:
        if countdown.is_over():
            whole(descriptor, content[: random.randrange(len(content))])
            die()
        return whole(descriptor, content)

    ledger.os.write = write  # type: ignore[assignment]


def between_the_ledger_and_the_release(calls: int) -> None:
    before(PrivateStep, "release", calls)


def in_the_middle_of_a_release(calls: int) -> None:
    from pmlf.mechanism.filters import FilterMemory

    before(FilterMemory, "apply", calls)


def between_the_release_and_the_optimizer(calls: int) -> None:
    before(torch.optim.SGD, "step", calls)


def in_the_middle_of_the_gradients(calls: int) -> None:
    before(PrivateStep, "accumulate", calls)


def in_the_middle_of_a_checkpoint(calls: int) -> None:
    before_sync(calls, ".checkpoint")


def before_a_checkpoint_s_rename(calls: int) -> None:
    replace, countdown = Path.replace, Countdown(calls)

    def renamed(self: Path, target: Path) -> Path:
        if countdown.is_over():
            die()
        return replace(self, target)

    files.Path.replace = renamed  # type: ignore[method-assign, assignment]


def after_a_checkpoint_s_rename(calls: int) -> None:
    before(files, "sync_folder", calls)


def before(owner: Any, name: str, calls: int) -> None:
    """Die where a function would begin, for the n-th time."""
    whole, countdown = getattr(owner, name), Countdown(calls)

    def dying(*given: Any, **named: Any) -> Any:
        if countdown.is_over():
            die()
        return whole(*given, **named)

    setattr(owner, name, dying)


def before_sync(calls: int, prefix: str) -> None:
    """Cut a file that is being written in half and die, before it is forced to the disk."""
    sync, countdown = os.fsync, Countdown(calls)

    def dying(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name.startswith(prefix) and countdown.is_over():
            os.truncate(path, path.stat().st_size // 2)
            die()
        sync(descriptor)

    files.os.fsync = dying  # type: ignore[assignment]


MOMENTS: dict[str, tuple[Callable[[int], None], int]] = {  # each with the largest n of its countdown
    "in the middle of a ledger line": (in_the_middle_of_a_ledger_line, 9),
    "between the ledger and the release": (between_the_ledger_and_the_release, 9),
    "in the middle of a release": (in_the_middle_of_a_release, 9),
    "between the release and the optimizer": (between_the_release_and_the_optimizer, 9),
    "in the middle of the gradients": (in_the_middle_of_the_gradients, 9),
    "in the middle of a checkpoint": (in_the_middle_of_a_checkpoint, 3),
    "before a checkpoint's rename": (before_a_checkpoint_s_rename, 4),
    "after a checkpoint's rename": (after_a_checkpoint_s_rename, 4),
}
OUTSIDE = "from outside, at a random time"


def witnessed(path: Path) -> None:
    """A byte in a file for every gradient that was released. The first one finds no noise of earlier processes."""
    release = PrivateStep.release
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    first = Countdown(1)

    def noted(self: PrivateStep, batch: LogicalBatch | None = None) -> None:
        if first.is_over() and self._noise.memory.vectors:
            raise RuntimeError("a process began with noise in its memory")
        release(self, batch)
        os.pwrite(descriptor, b".", os.fstat(descriptor).st_size)

    PrivateStep.release = noted  # type: ignore[method-assign]


def attempt(spec: RunSpec, out: Path, moment: str | None, calls: int) -> int:
    """Begin or go on in a process of its own, to the end or to the kill; its exit status."""
    child = os.fork()
    if child == 0:
        witnessed(out.with_suffix(".released"))
        if moment in MOMENTS:
            MOMENTS[moment][0](calls)
        try:
            runner.run(spec, out, resume=True, checkpoint_every=CHECKPOINT_EVERY)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if moment == OUTSIDE:
        time.sleep(random.uniform(0.05, 0.6))
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def torture(spec: RunSpec, out: Path, kills: int) -> dict[str, Any]:
    """Kill a run so many times, then let it end."""
    moments: Counter[str] = Counter()
    margins = []
    names = [*MOMENTS, OUTSIDE]
    while sum(moments.values()) < kills:
        moment = names[sum(moments.values()) % len(names)]
        status = attempt(spec, out, moment, random.randint(1, MOMENTS[moment][1] if moment in MOMENTS else 1))
        if status == 0:
            raise RuntimeError(f"the run ended after {sum(moments.values())} kills: plan more steps")
        if status != -signal.SIGKILL:
            raise RuntimeError(f"resuming failed after a kill {moment}")
        moments[moment] += 1
        margins.append(counted_in(out) - released_by(out))
    if attempt(spec, out, None, 1) != 0:
        raise RuntimeError("the run could not be ended")
    result = json.loads((out / "result.json").read_text())
    ((event, spent),) = ledger.read(out / "ledger.jsonl").events.items()  # which never become fewer
    return {
        "kills": dict(moments),
        "steps_planned": result["planned_steps"],
        "steps_of_the_model": result["steps"],
        "gradients_released": released_by(out),
        "releases_in_the_ledger": counted_in(out),
        "events_in_the_ledger": spent,
        "least_events_beyond_released": min([*margins, counted_in(out) - released_by(out)]),
        "epsilon": accounting.epsilon(**vars(event), steps=spent, delta=DELTA),
    }


def counted_in(out: Path) -> int:
    """How many releases are in the ledger."""
    path = out / "ledger.jsonl"
    begun = path.exists() and b"\n" in path.read_bytes()
    return sum(ledger.read(path).starts.values()) if begun else 0


def released_by(out: Path) -> int:
    """How many gradients were released, those that were released again too."""
    witness = out.with_suffix(".released")
    return witness.stat().st_size if witness.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--bands", type=int, default=1, help="of the noise; 1 is white")
    given = parser.parse_args()
    random.seed(given.seed)
    torch.set_num_threads(1)  # the children are forked: no thread may run yet
    steps = STEPS_A_KILL * given.kills
    spec = RunSpec(
        model="linear",
        records=RECORDS,
        batch_size=BATCH,
        steps=steps,
        epsilon=TARGET_EPSILON,
        delta=DELTA,
        ema=0.9,
        seed=7,
        options=MethodOptions(bands=given.bands),
    )
    rate = BATCH / RECORDS
    torch.optim.SGD(tasks.prepare(spec).model.parameters())  # what is imported and read here, no child has to
    noise = accounting.noise_multiplier(
        target_epsilon=TARGET_EPSILON, target_delta=DELTA, sample_rate=rate, steps=steps, bands=given.bands
    )
    with tempfile.TemporaryDirectory() as folder:
        whole, seeded, fresh = (Path(folder) / name for name in ("whole", "seeded", "fresh"))
        begin = time.monotonic()
        attempt(spec, whole, None, 1)
        report = {
            "seeded": torture(spec, seeded, given.kills),
            "unseeded": torture(RunSpec(**{**vars(spec), "seed": None}), fresh, given.kills),
        }
        del report["seeded"]["least_events_beyond_released"]  # what is released again is the same event there
        report["seeded"]["same_bits"] = all(
            (whole / name).read_bytes() == (seeded / name).read_bytes()
            for name in ("model.safetensors", "model-ema.safetensors")
        )
        seconds = time.monotonic() - begin
    print(
        json.dumps(
            {
                "target_epsilon": TARGET_EPSILON,
                "delta": DELTA,
                "sample_rate": rate,
                "bands": given.bands,
                "noise_multiplier": noise,
                "checkpoint_every": CHECKPOINT_EVERY,
                **report,
                "seconds": round(seconds, 1),
                "torch": torch.__version__,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
