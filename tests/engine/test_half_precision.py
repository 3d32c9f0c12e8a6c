"""bfloat16 on the CPU is tried elsewhere first, and refused where it would end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pmlf import PrivateStep
from pmlf.engine import half_precision
from zoo import classify, images

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    half_precision.deadly.cache_clear()
    yield
    half_precision.deadly.cache_clear()


def advertise(amx: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = tmp_path / "cpuinfo"
    cpu.write_text("flags : fpu sse2 " + ("amx_bf16 amx_tile" if amx else ""))
    monkeypatch.setattr(half_precision, "_CPU", cpu)


def in_bfloat16(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return classify(model, batch)


def step_of(loss: Any) -> PrivateStep:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4))
    return PrivateStep(model, loss, method="dpsgd", noise_multiplier=0.0, expected_batch_size=1.0)


def test_bfloat16_that_dies_of_a_signal_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advertise(True, tmp_path, monkeypatch)
    monkeypatch.setattr(half_precision, "TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(ValueError, match=r"ONEDNN_MAX_CPU_ISA=AVX512_CORE"):
        step_of(in_bfloat16).accumulate(images(3, 8, 8)(3))
    step_of(classify).accumulate(images(3, 8, 8)(3))  # float32 is none of its business


def test_without_amx_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advertise(False, tmp_path, monkeypatch)
    monkeypatch.setattr(half_precision, "TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not half_precision.deadly()


@pytest.mark.slow
def test_a_convolution_under_autocast_agrees_with_float32_or_is_refused() -> None:
    """In a process of its own, with the instructions that torch may use held to those that always run."""
    script = f"""
import sys, warnings
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import torch
from test_half_precision import in_bfloat16, step_of
from zoo import classify, images
warnings.simplefilter("ignore")
batch, found = images(3, 8, 8)(5), []
for loss in (in_bfloat16, classify):
    torch.manual_seed(0)
    step = step_of(loss)
    step.accumulate(batch)
    step.release()
    found.append(torch.cat([p.grad.flatten() for p in step.trained]))
assert found[0].dtype == torch.float32 and not torch.equal(*found)
torch.testing.assert_close(*found, rtol=0.05, atol=0.05)
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
