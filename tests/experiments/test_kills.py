"""Runs, and the runner of many, killed wherever they are: by scripts of benchmarks/, which have the long form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pmlf

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MOMENTS = 9


def told(script: str, *options: str) -> dict[str, Any]:
    """What a script of benchmarks/ prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pmlf.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / script), *options]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    document: dict[str, Any] = json.loads(process.stdout)
    return document


def test_a_runner_that_is_killed_and_started_again_ends_with_the_same_results() -> None:
    report = told("runner_kills.py", "--artifact", "figure-6", "--kills", "2")
    assert report["same_results"] and len(report["runs_whole_at_each_kill"]) == 2
    assert report["runs_whole_at_each_kill"][-1] < report["runs"]  # there was something left to kill


def test_killed_runs_keep_their_promises() -> None:
    report = told("kills.py", "--kills", str(MOMENTS))
    seeded, fresh = report["seeded"], report["unseeded"]
    assert len(seeded["kills"]) == len(fresh["kills"]) == MOMENTS
    assert seeded["same_bits"]
    assert seeded["steps_of_the_model"] == seeded["events_in_the_ledger"] == seeded["steps_planned"]
    assert seeded["gradients_released"] > seeded["steps_planned"]  # some were released again, and counted once
    assert fresh["least_events_beyond_released"] >= 0
    assert fresh["steps_of_the_model"] < fresh["gradients_released"] <= fresh["events_in_the_ledger"]
    assert fresh["epsilon"] <= report["target_epsilon"]
