"""Memory of one private step at RoBERTa-base size, against the same plain step, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_private_step_at_roberta_base_size_peaks_under_two_and_a_half_times_a_plain_one() -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "memory.py"
    output = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True).stdout
    measured = json.loads(output.splitlines()[-1])
    assert measured["plain"] > 1e9  # 125 million parameters and their gradients, in float32
    assert measured["ratio"] < 2.5
