"""`pmlf account`."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pmlf.cli.common import Command
from pmlf.cli.display import claims_table, facts, trials_table
from pmlf.experiments.spec import USUAL_DELTA, Budget, shown_default


@dataclass(frozen=True, kw_only=True)
class Account(Budget, Command):
    """The noise multiplier for an epsilon, the epsilon of a noise multiplier, a certificate checked, a ledger added up.

    A step draws each record with probability batch size / records and adds Gaussian noise to the clipped sum. Without
    any option: the noise of a `pmlf train` without any option. PLD is the accountant that `pmlf train` uses; RDP is
    looser and stands beside it for comparison. Nothing is trained.
    """

    certificate: Annotated[Path | None, shown_default("none", "FILE")] = None
    """Recompute every epsilon of this certificate.json from its own numbers. Exit code 0 if all hold, 1 if not.
    Whether its numbers are true is not for arithmetic to say."""

    ledger: Annotated[Path | None, shown_default("none", "FILE")] = None
    """Say what the runs in this ledger have spent together, at --delta (default: 1e-5): by PLD if all is of one run
    with one plan, by an RDP filter if there is more."""

    records: int = 12_000
    """Number n of training records."""

    def execute(self) -> int:
        if self.certificate is not None and self.ledger is not None:
            raise ValueError("--certificate and --ledger are both given: each is looked at by itself, so give one")
        if self.certificate is not None:
            return self._check(self.certificate)
        if self.ledger is not None:
            return self._add_up(self.ledger)
        return self._calibrate()

    def _check(self, path: Path) -> int:
        from pmlf.evidence import certificate

        found, reason = certificate.examined(certificate.read(path))
        self.show(
            {
                "holds": reason is None,
                "reason": reason,
                "claims": [{**asdict(claim), "holds": claim.holds} for claim in found],
            },
            *([claims_table(found)] if found else []),
            "The certificate does NOT hold: " + reason + "." if reason else "The certificate holds.",
        )
        return 1 if reason else 0

    def _add_up(self, path: Path) -> int:
        from pmlf.evidence import ledger
        from pmlf.mechanism import accounting

        tally = ledger.read(path)
        delta = USUAL_DELTA if self.delta is None else self.delta
        planned = len({trial.plan for trial in tally.trials}) == 1
        if planned:
            ((event, count),) = tally.events.items()
            spent = accounting.epsilon(**asdict(event), steps=count, delta=delta)
        else:
            spent = accounting.filter_epsilon(tally.events, delta=delta)
        runs = [
            {
                "run": t.run,
                "beginning": t.beginning,
                **asdict(t.event),
                "planned_steps": t.planned_steps,
                "seeded": t.replayable,
                "events": count,
            }
            for t, count in tally.trials.items()
        ]
        rule = "PLD" if planned else "RDP filter"
        self.show(
            {"epsilon": spent, "delta": delta, "composition": rule, "runs": runs},
            trials_table(runs),
            facts([("epsilon", f"{spent:.5g} by {rule}, at delta {delta:.3g}")]),
        )
        return 0

    def _calibrate(self) -> int:
        from pmlf.mechanism import accounting

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
