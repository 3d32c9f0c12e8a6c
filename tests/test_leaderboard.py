"""The leaderboard: made from the stored records, with published figures marked as such."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_what_the_stored_records_say() -> None:
    checked = subprocess.run([sys.executable, ROOT / "scripts" / "leaderboard.py", "--check"], check=False)
    assert checked.returncode == 0, "run `python scripts/leaderboard.py`"


def test_every_published_figure_is_marked_as_published() -> None:
    figures = json.loads((ROOT / "docs" / "results" / "published.json").read_text())["figures"]
    lines = (ROOT / "docs" / "leaderboard.md").read_text().splitlines()
    for figure in figures:
        (line,) = [
            line
            for line in lines
            if figure["recipe"] in line and f"| {figure['epsilon']} |" in line and f"{figure['accuracy']:g}" in line
        ]
        assert "*published:*" in line and figure["source"] in line
