"""Kill `pmlf reproduce` ten times, wherever it is, and start it again: does it end with the same results?

    python benchmarks/runner_kills.py --out docs/results/runner-kills.json

The real command in its smoke profile with two processes, once undisturbed and once killed (SIGKILL) some random steps
after it began: by turns the command alone, whose processes must notice, and all of its processes at once. Then what
both have left is compared: the record but for what it cost, and the model, course and spent epsilon of every run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track


def start(artifact: str, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pmlf", "reproduce", artifact, "--profile", "smoke", "--jobs", "2"]
    return subprocess.Popen(
        [*command, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, to be killed as one
    )


def finished(out: Path) -> int:
    """How many runs are whole."""
    return len(list(out.glob("runs/*/result.json")))


def steps(out: Path) -> int:
    """How many steps all ledgers count, those done again too."""
    return sum(len(path.read_bytes().splitlines()) for path in out.glob("runs/*/ledger.jsonl"))


def results(out: Path) -> dict[str, Any]:
    """What was left that does not depend on time, place or how often it was cut off."""
    (record,) = (json.loads(path.read_text()) for path in out.glob("*.json"))
    cells = [
        {
            **{name: value for name, value in cell.items() if name not in ("runs", "certificate")},
            "runs": [{name: value for name, value in run.items() if name != "cost"} for run in cell["runs"]],
        }
        for cell in record["cells"]
    ]
    left: dict[str, Any] = {"record": {**record, "cells": cells}}
    for folder in sorted(path.parent for path in out.glob("runs/*/result.json")):
        certificate = json.loads((folder / "certificate.json").read_text())
        spent = {name: certificate[name] for name in ("epsilon_at_released_steps", "released_steps")}
        left[folder.name] = {**spent, "model": (folder / "model.safetensors").read_bytes()}
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", default="figure-3", help="what to reproduce (default figure-3)")
    parser.add_argument("--kills", type=int, default=10, help="how often (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, killed = Path(folder) / "undisturbed", Path(folder) / "killed"
        assert start(arguments.artifact, undisturbed).wait() == 0
        apart = steps(undisturbed) // arguments.kills  # so that the last one finds something to kill
        done = []
        for number in track(range(arguments.kills), "killing", console=Console(stderr=True)):
            enough = steps(killed) + moments.randint(1, apart)
            process = start(arguments.artifact, killed)
            while steps(killed) < enough:
                assert process.poll() is None, "it was over before it was killed: take an artifact with more steps"
                time.sleep(0.01)
            if number % 2:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            process.wait()
            done.append(finished(killed))
        assert start(arguments.artifact, killed).wait() == 0
        same = results(undisturbed) == results(killed)
        document = {
            "artifact": arguments.artifact,
            "kills": arguments.kills,
            "runs": finished(undisturbed),
            "runs_whole_at_each_kill": done,
            "same_results": same,
        }
    print(json.dumps(document, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
