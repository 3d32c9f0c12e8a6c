"""`pmlf selftest`: whether this machine computes private gradients and noise correctly."""

from __future__ import annotations

from dataclasses import dataclass

from pmlf.cli.common import Command, say


@dataclass(frozen=True, kw_only=True)
class SelfTest(Command):
    """Test private gradients and noise on this machine and device, in about a minute, on synthetic data.

    Gradients of every rule are compared with float64 on the CPU, one sample at a time. Each sample is left out once, to
    measure the sensitivity. Noise must have its scale, mean and tails. Time and memory are shown relative to a
    non-private gradient. Run it once on every kind of GPU that you train on. The exit code is 1 if a check fails.
    """

    device: str = "cpu"
    """Name of the device: cpu, cuda, cuda:1, mps."""

    def execute(self) -> int:
        from pmlf.bench import selftest

        document = selftest.run(self.device, say)
        self.show(document, *selftest.readable(document))
        return 0 if document["passed"] else 1
