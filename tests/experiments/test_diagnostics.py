"""Diagnostics: measurements against known values, and that they are made only on request."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pmlf import data, methods, models
from pmlf.cli.main import main
from pmlf.experiments import diagnostics, runner
from pmlf.experiments.diagnostics import Probe
from pmlf.experiments.spec import MethodOptions, RunSpec
from pmlf.reproduction.report import page

SPEC = RunSpec(method="dp-pmlf", model="linear", records=300, batch_size=100, steps=40, epsilon=8.0, lr=0.5, seed=0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diagnosed") / "run"
    runner.run(SPEC, out, diagnostics=True)
    return out


def document(folder: Path) -> dict[str, dict[str, float]]:
    return json.loads((folder / "diagnostics.json").read_text())


@pytest.mark.slow
def test_only_the_owner_can_read_files_that_show_them(measured: Path, tmp_path: Path) -> None:
    page, markdown = tmp_path / "page.html", tmp_path / "page.md"
    page.touch(0o644)
    arguments = ["report", str(measured), "--out", str(page), "--markdown", str(markdown)]
    before = os.umask(0)
    try:
        assert main(arguments) == 0
    finally:
        os.umask(before)
    for path in (measured / "diagnostics.json", page, markdown):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    page.unlink()
    page.symlink_to(tmp_path / "elsewhere")
    assert main(arguments) == 2 and not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_the_run_is_the_same_with_them_and_the_certificate_names_them(measured: Path, tmp_path: Path) -> None:
    runner.run(SPEC, tmp_path / "quiet")
    assert not (tmp_path / "quiet" / "diagnostics.json").exists()
    assert (tmp_path / "quiet/model.safetensors").read_bytes() == (measured / "model.safetensors").read_bytes()

    def left_out(folder: Path) -> list[str]:
        return json.loads((folder / "certificate.json").read_text())["not_accounted_for"]

    assert set(left_out(measured)) - set(left_out(tmp_path / "quiet")) == {
        "diagnostics of gradients before the noise, recorded on demand"
    }
    assert "sensitive" in str(document(measured)["note"])


@pytest.mark.slow
def test_white_noise_is_filtered_as_the_theory_predicts(measured: Path) -> None:
    gain = document(measured)["noise_gain"]
    assert gain["theory"] == pytest.approx(0.1**2 / (1 - 0.9**2))
    assert gain["measured"] == pytest.approx(gain["theory"], rel=0.15)
    power = np.array(document(measured)["spectra"]["noise"])[:, 1]
    assert power.std() / power.mean() < 0.1  # flat
    filtered = np.array(document(measured)["spectra"]["noise_filtered"])[:, 1]
    assert filtered[-1] < 0.1 * filtered[0]


@pytest.mark.slow
def test_the_measured_gradient_is_that_of_plain_autograd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First step: mean gradient, clipped mean and fraction clipped, computed one record at a time."""
    seen: list[Probe] = []
    monkeypatch.setattr(Probe, "measure", lambda probe, measure=Probe.measure: (measure(probe), seen.append(probe))[0])
    runner.run(replace(SPEC, steps=2, batch_size=20, model="linear"), tmp_path / "run", diagnostics=True)
    probe = seen[0]
    images = data.load().train
    model = models.build("linear", in_channels=1, image_size=28, classes=10, seed=0)
    rows = []
    for index in range(256):
        image, label = images[index]
        loss = F.cross_entropy(model(image[None]), torch.tensor([label]))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).double())
    each = torch.stack(rows)
    norms = each.norm(dim=1)
    clipped = (each * (1 / norms.clamp(min=1.0))[:, None]).mean(0)
    torch.testing.assert_close(probe._gradients[0], each.mean(0), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(probe._signals[0], clipped, rtol=1e-3, atol=1e-6)
    assert probe._clipped[0][0] == float((norms > 1.0).double().mean())
    assert probe._squares[0][0] == pytest.approx(float(norms.square().mean()), rel=1e-4)


@pytest.mark.slow
def test_momentum_over_equal_iterates_reduces_no_variance(tmp_path: Path) -> None:
    """With a tiny step size all iterates are equal: Assumption 5 fails, and the measured reduction is 1."""
    still = replace(SPEC, lr=1e-9, steps=6, options=MethodOptions(k=3, beta=1.0))
    runner.run(still, tmp_path / "still", diagnostics=True)
    found = document(tmp_path / "still")
    assert found["variance_reduction"]["theory"] == pytest.approx(3.0)
    assert found["variance_reduction"]["measured"] == pytest.approx(1.0, abs=1e-3)
    assert found["clipping"]["bias_with_momentum"] == pytest.approx(
        found["clipping"]["bias_without_momentum"], rel=1e-3
    )
    assert found["autocorrelation"] == pytest.approx([1.0] * 6, abs=1e-4)


def test_sketches_keep_inner_products_and_are_linear() -> None:
    sketch = diagnostics._Sketch(100_000)
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(100_000, generator=generator) for _ in range(2))
    y = x + 0.3 * y
    first, second = sketch.of([x]), sketch.of([y[:40_000], y[40_000:]])
    assert len(first) == diagnostics.SKETCH and not sketch.exact
    assert float(first @ second) == pytest.approx(float(x @ y), rel=0.05)
    torch.testing.assert_close(sketch.of([x + y]), first + second, rtol=1e-4, atol=1e-4)


def test_the_filter_of_a_series_is_the_filter_of_the_steps() -> None:
    from pmlf.mechanism.filters import FilterMemory

    low_pass = methods.dp_pmlf(a=(-0.9,), b=(0.15, -0.05)).low_pass
    series = torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    memory = FilterMemory(low_pass)
    stepped = np.stack([memory.apply([row.clone()])[0].numpy() for row in series])
    np.testing.assert_allclose(diagnostics._filtered(low_pass, series.numpy()), stepped, rtol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "disk", "--seed", "0"], "disk looks ahead"),
        ([], "give --seed"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--model", "linear", "--records", "50", "--batch-size", "10", "--steps", "2", "--noise-multiplier", "1"]
    assert main(["train", "--diagnostics", *few, *arguments, "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "not covered by epsilon" in printed
    assert not (tmp_path / "run").exists()


def test_the_report_shows_theory_and_measurement(measured: Path) -> None:
    made = page.render([], [document(measured)])
    assert "Autocorrelation of the gradient" in made and "0.0526" in made and "1.198" in made
    assert "Γ_DP" in made
