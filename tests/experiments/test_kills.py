"""Killed runs, and a killed `pmlf reproduce`, by short forms of scripts in benchmarks/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pmlf

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KILLS = 9


def output_of(script: str, *options: str) -> dict[str, Any]:
    """The JSON document that a script of benchmarks/ prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pmlf.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / script), *options]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    document: dict[str, Any] = json.loads(process.stdout)
    return document


@pytest.mark.slow
def test_a_reproduction_that_is_killed_and_restarted_ends_with_the_same_results() -> None:
    report = output_of("runner_kills.py", "--artifact", "figure-6", "--kills", "2")
    assert report["same_results"] and len(report["runs_whole_at_each_kill"]) == 2
    assert report["runs_whole_at_each_kill"][-1] < report["runs"]  # there was something left to do


@pytest.mark.slow
@pytest.mark.parametrize("bands", [1, 4])
def test_killed_runs_keep_their_guarantees(bands: int) -> None:
    kills = KILLS if bands == 1 else 5
    report = output_of("kills.py", "--kills", str(kills), "--bands", str(bands))
    seeded, fresh = report["seeded"], report["unseeded"]
    assert sum(seeded["kills"].values()) == sum(fresh["kills"].values()) == kills
    assert seeded["same_bits"]
    assert seeded["steps_of_the_model"] == seeded["releases_in_the_ledger"] == seeded["steps_planned"]
    assert seeded["events_in_the_ledger"] == -(-seeded["steps_planned"] // bands)
    assert seeded["gradients_released"] > seeded["steps_planned"]  # some were repeated, and counted once
    assert fresh["least_events_beyond_released"] >= 0
    assert fresh["steps_of_the_model"] < fresh["gradients_released"] <= fresh["releases_in_the_ledger"]
    assert fresh["releases_in_the_ledger"] <= bands * fresh["events_in_the_ledger"]
    assert fresh["epsilon"] <= report["target_epsilon"]
