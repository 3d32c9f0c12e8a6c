"""A run killed in the middle of every kind of write and step, by benchmarks/kills.py, which has the long form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pmlf

KILLS = Path(__file__).resolve().parents[1] / "benchmarks" / "kills.py"
MOMENTS = 9


def test_killed_runs_keep_their_promises() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(pmlf.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(KILLS), "--kills", str(MOMENTS)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    seeded, fresh = report["seeded"], report["unseeded"]
    assert len(seeded["kills"]) == len(fresh["kills"]) == MOMENTS
    assert seeded["same_bits"]
    assert seeded["steps_of_the_model"] == seeded["events_in_the_ledger"] == seeded["steps_planned"]
    assert seeded["gradients_released"] > seeded["steps_planned"]  # some were released again, and counted once
    assert fresh["least_events_beyond_released"] >= 0
    assert fresh["steps_of_the_model"] < fresh["gradients_released"] <= fresh["events_in_the_ledger"]
    assert fresh["epsilon"] <= report["target_epsilon"]
