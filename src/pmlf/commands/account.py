"""`pmlf account`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from pmlf.commands.common import Command
from pmlf.experiments.display import facts
from pmlf.experiments.spec import Budget


@dataclass(frozen=True, kw_only=True)
class Account(Budget, Command):
    """The noise multiplier for an epsilon, or the epsilon of a noise multiplier; nothing is trained.

    A step draws each record with probability batch size / records and adds Gaussian noise to the clipped sum. Without
    any option: the noise of a `pmlf train` without any option. PLD is the accountant that `pmlf train` uses; RDP is
    looser and stands beside it for comparison.
    """

    records: int = 12_000
    """Number n of training records."""

    def execute(self) -> int:
        from pmlf import accounting

        if self.records < 1:
            raise ValueError(f"records={self.records} is no training set: give 1 or more")
        if not 0 < self.batch_size <= self.records:
            raise ValueError(
                f"batch_size={self.batch_size} is not in (0, {self.records}]: it is the expected number of records a "
                "step, at most all of them"
            )
        budget = self.resolved(self.records)
        assert budget.delta is not None
        rate, steps = self.batch_size / self.records, budget.planned_steps(self.records)
        noise_multiplier = budget.noise_multiplier
        if noise_multiplier is None:
            assert budget.epsilon is not None
            noise_multiplier = accounting.noise_multiplier(
                target_epsilon=budget.epsilon, target_delta=budget.delta, sample_rate=rate, steps=steps
            )
        pld, rdp = (
            accounting.epsilon(
                noise_multiplier=noise_multiplier, sample_rate=rate, steps=steps, delta=budget.delta, accountant=name
            )
            for name in ("pld", "rdp")
        )
        if budget.delta * self.records >= 1:
            warnings.warn(f"delta={budget.delta} is not below 1/n = {1 / self.records:.3g}: choose less", stacklevel=1)
        self.show(
            {
                "noise_multiplier": noise_multiplier,
                "epsilon": pld,
                "epsilon_rdp": rdp,
                "delta": budget.delta,
                "records": self.records,
                "batch_size": self.batch_size,
                "sample_rate": rate,
                "steps": steps,
            },
            facts(
                [
                    ("noise multiplier", f"{noise_multiplier:.5g}"),
                    ("epsilon", f"{pld:.5g} by PLD, {rdp:.5g} by RDP, at delta {budget.delta:.3g}"),
                    ("steps", f"{steps}, each record joining with probability {rate:.4g}"),
                ]
            ),
        )
        return 0
