"""This engine and that of another commit, in turns: whether a change is faster than the machine is noisy.

    git worktree add ../before <commit>
    python benchmarks/engines.py ../before --case cnn5 --contender pmlf-k1 --out docs/results/engines.json

Each has a process of its own, which is alive all the time and keeps what it frees. A turn is a plain pass and a private
one, both timed after an untimed one; who begins changes from round to round. Times are over the plain passes of both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


def work(case_name: str, contender: str, threads: int) -> None:
    """A line in, a turn's two times out."""
    import torch

    from pmlf import machine

    package = "pmlf.bench" if importlib.util.find_spec("pmlf.bench") else "pmlf.benchmark"  # of older commits
    cases, contenders = (importlib.import_module(f"{package}.{name}") for name in ("cases", "contenders"))

    machine.keep_freed_memory()
    torch.set_num_threads(threads)
    case = cases.find(case_name)
    plain = contenders.find("plain-channels-last" if case.images else "plain").prepare(*case.prepare(1.0), 1)
    private = contenders.find(contender).prepare(*case.prepare(1.0), 1)

    for _ in sys.stdin:
        print(timed(plain), timed(private), flush=True)


def timed(runner: Any) -> float:
    """Seconds of the second of two calls."""
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        runner.gradient()
        seconds = time.perf_counter() - start
        if runner.release is not None:
            runner.release()
        runner.clear()
    return seconds


def take_turn(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process ended before its turn: what it said is above")
    plain, private = map(float, line.split())
    return plain, private


def race(trees: dict[str, Path], arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """(plain, private) seconds of every round and engine."""
    command = [sys.executable, __file__, str(arguments.other), "--case", arguments.case]
    command += ["--contender", arguments.contender, "--threads", str(arguments.threads), "--worker"]
    with ExitStack() as stack:
        workers = {}
        for name, tree in trees.items():
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(tree / "src")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            workers[name] = process
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
        for number in range(arguments.rounds):
            for name in sorted(workers, reverse=number % 2 == 1):
                times[name].append(take_turn(workers[name]))
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--case", default="cnn5", help="a case of pmlf bench (default cnn5)")
    parser.add_argument("--contender", default="pmlf-k1", help="a private contender of it (default pmlf-k1)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (default 20)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--out", type=Path, help="JSON file, to which this comparison is added")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.case, arguments.contender, arguments.threads)
        return
    if not (arguments.other / "src" / "pmlf").is_dir():
        parser.error(f"{arguments.other} has no src/pmlf: give a checkout of another commit (git worktree add)")
    times = race({"other": arguments.other.resolve(), "this": HERE}, arguments)
    plains = [plain for turns in times.values() for plain, _ in turns]
    found = {}
    for name, turns in times.items():
        private = [seconds for _, seconds in turns]
        found[name] = {
            "best_over_plain": min(private) / min(plains),
            "median_over_plain": statistics.median(private) / statistics.median(plains),
            "seconds": private,
        }
        best, median = found[name]["best_over_plain"], found[name]["median_over_plain"]
        print(f"{name:5} {arguments.case} {arguments.contender}: {best:.2f} of a plain pass, by medians {median:.2f}")
    if arguments.out:
        from pmlf.bench.suite import on_this_machine

        document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"comparisons": []}
        settings = {"case": arguments.case, "contender": arguments.contender, "rounds": arguments.rounds}
        document["comparisons"].append(
            {"machine": on_this_machine(arguments.threads), **settings, "plain_seconds": plains, "engines": found}
        )
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
