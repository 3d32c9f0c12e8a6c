"""The short form of `benchmarks/rank_kills.py`: a rank is killed once at each kind of moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "rank_kills.py"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_a_killed_rank_stops_the_others_and_the_resumed_run_ends_with_the_same_bits() -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "5", "--runs", "seeded"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["seeded"]
    assert set(found["kills"].values()) == {1} and len(found["kills"]) == 5
    assert found["same_bits_as_one_process"]
    assert found["events_in_the_ledger"] == found["steps"] == found["planned_steps"]
    assert found["most_seconds_until_all_stopped"] < 60
