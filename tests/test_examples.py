"""Every script in `examples/` runs as it stands, on one thread, without network, and says what it did."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
MOST_LINES = 80
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("script", [pytest.param(path, id=path.name) for path in EXAMPLES])
def test_an_example_runs_and_prints_its_result(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, **OFFLINE}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("script", [pytest.param(path, id=path.name) for path in EXAMPLES])
def test_an_example_is_short_and_says_what_it_is_for(script: Path) -> None:
    source = script.read_text()
    assert len(source.splitlines()) < MOST_LINES
    assert ast.get_docstring(ast.parse(source))
