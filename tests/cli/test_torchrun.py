"""`torchrun -m pmlf train`: one folder, one ledger and one certificate for all processes, and one process can go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pmlf.cli.main import main
from pmlf.evidence import ledger

STEPS = 150


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="torchrun is stopped by a signal")
def test_one_process_goes_on_where_two_were_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pmlf"]
    options = ["--model", "linear", "--batch-size", "100", "--max-physical-batch-size", "25", "--seed", "0"]
    started = subprocess.Popen(
        [*command, "train", *options, "--noise-multiplier", "1", "--steps", str(STEPS), "--out", str(out)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    book = out / "ledger.jsonl"
    while started.poll() is None and not (book.exists() and book.read_text().count("\n") > 3):
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    shown, said = started.communicate(timeout=120)
    assert shown.count("written to") == 1, said  # by rank 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    stopped = json.loads((out / "certificate.json").read_text())
    assert stopped["processes"] == 2 and 0 < stopped["released_steps"] < STEPS
    assert main(["train", "--resume", str(out)]) == 0
    ended = json.loads((out / "certificate.json").read_text())
    assert ended["released_steps"] == STEPS == sum(ledger.read(book).events.values())
