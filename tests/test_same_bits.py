"""Seeded runs end with the weights that are recorded: a change of form changes no number.

`python dev/same_bits.py --write` records them again after a change that is meant to change numbers.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "dev" / "same_bits.py"


@pytest.mark.slow
def test_seeded_runs_end_with_the_recorded_weights() -> None:
    recorded = json.loads((SCRIPT.parent / "results" / "same-bits.json").read_text())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run([sys.executable, str(SCRIPT)], check=True, capture_output=True, text=True, env=environment)
    found = json.loads(output.stdout)
    assert found["runs"].keys() == recorded["runs"].keys()
    for name, run in recorded["runs"].items():
        if found["kernels"] == recorded["kernels"]:  # the same processor's arithmetic: the same bits
            assert found["runs"][name]["digest"] == run["digest"], name
        assert math.isclose(found["runs"][name]["norm"], run["norm"], rel_tol=1e-3), name
        assert math.isclose(found["runs"][name]["sum"], run["sum"], rel_tol=1e-2, abs_tol=1e-2 * run["norm"]), name
