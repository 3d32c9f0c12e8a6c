"""`pmlf selftest`: passes here, fails where gradients, noise or a device are wrong, and says so in its exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pmlf.bench import probes, selftest
from pmlf.checks.inspection import rules_used
from pmlf.cli.main import main


@pytest.mark.slow
def test_the_cpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] and document["device"] == {"device": "cpu", "name": "cpu"}
    checks = {row["check"]: row["passed"] for row in document["rows"]}
    for probe in probes.PROBES:
        assert checks[f"gradients: {probe.name}"] is True and checks[f"sensitivity: {probe.name}"] is True
    assert checks["noise: standard deviation"] is True and checks["time at k=1"] is None


def test_every_rule_of_the_engine_has_a_probe() -> None:
    found: set[str] = set()
    for probe in probes.PROBES:
        if probe.gradients == "ghost":
            model, batch = probe.prepare(3)
            found |= set(rules_used(model, probes.losses, batch).values())
    assert found >= {"linear", "convolution", "embedding", "layer norm", "rms norm", "group norm", "instance norm"}


def run_with(monkeypatch: pytest.MonkeyPatch, *probed: probes.RuleProbe) -> dict[str, Any]:
    monkeypatch.setattr(selftest, "PROBES", probed or probes.PROBES[:1])
    monkeypatch.setattr(selftest, "_costs", lambda device: [])
    return selftest.run("cpu", lambda line: None)


def failed(document: dict[str, Any]) -> set[str]:
    return {row["check"] for row in document["rows"] if row["passed"] is False}


@pytest.mark.slow
def test_too_little_noise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from pmlf.mechanism import noise

    original = noise.SecureRandomness.stream

    class Weak:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def add_gaussian_(self, value: torch.Tensor, std: float, **named: Any) -> None:
            self._stream.add_gaussian_(value, 0.98 * std, **named)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    monkeypatch.setattr(noise.SecureRandomness, "stream", lambda self, *key: Weak(original(self, *key)))
    document = run_with(monkeypatch)
    assert not document["passed"] and "noise: standard deviation" in failed(document)
    assert "Do not train privately" in str(selftest.readable(document)[1])


def test_gradients_of_less_precision_than_promised_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU computes that rounds products to ten bits: every output of a layer is off by a thousandth."""
    rough = probes.RuleProbe(name="rough", build=probes.PROBES[0].build, shape=(6,))
    original = selftest._flat

    def rounded(tensors: Any) -> torch.Tensor:
        return original([t.bfloat16() if t.dtype == torch.float32 else t for t in tensors])

    monkeypatch.setattr(selftest, "_flat", rounded)
    assert "gradients: rough" in failed(run_with(monkeypatch, rough))


def test_an_error_is_a_failed_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = probes.RuleProbe(name="broken", build=lambda: torch.nn.Linear(5, 4), shape=(6,))
    document = run_with(monkeypatch, probes.PROBES[0], broken)
    assert failed(document) == {"broken"}
    row = next(row for row in document["rows"] if row["check"] == "broken")
    assert row["measured"].startswith("RuntimeError: mat1 and mat2 shapes")


def test_a_device_that_is_not_there_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    missing = "mps" if torch.cuda.is_available() else "cuda"
    for name in (missing, "gpu"):
        assert main(["selftest", "--device", name]) == 2
        err = capsys.readouterr().err
        assert f"--device={name!r} cannot be used here" in err.splitlines()[-1] and "cpu" in err
