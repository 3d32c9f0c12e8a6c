"""What was spent and how, as JSON: the numbers from which anybody can recompute epsilon."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

from pmlf import accounting
from pmlf.methods import Method


def certificate(
    *,
    method: Method,
    clipping: str,
    population: int,
    expected_batch_size: float,
    noise_multiplier: float,
    clip_norm: float,
    planned_steps: int,
    released_steps: int,
    delta: float,
    randomness: str,
    reproducible: bool,
) -> dict[str, Any]:
    """A JSON-ready account of a run: the mechanism with all its public constants, and the epsilon they give."""
    rate = expected_batch_size / population

    def spent(steps: int) -> dict[str, float]:
        return {
            name: accounting.epsilon(
                noise_multiplier=noise_multiplier, sample_rate=rate, steps=steps, delta=delta, accountant=name
            )
            for name in accounting.ACCOUNTANTS
        }

    return {
        "mechanism": "Poisson-subsampled Gaussian, once per step",
        "unit_of_privacy": "one record of the training set",
        "adjacency": "add or remove one record",
        "delta": delta,
        "epsilon_at_planned_steps": spent(planned_steps),
        "epsilon_at_released_steps": spent(released_steps),
        "planned_steps": planned_steps,
        "released_steps": released_steps,
        "records": population,
        "expected_batch_size": expected_batch_size,
        "sample_rate": rate,
        "noise_multiplier": noise_multiplier,
        "clip_norm": clip_norm,
        "clipping": clipping,
        "method": {
            "name": method.name,
            "points": [{"coefficients": list(p.coefficients), "weight": p.weight} for p in method.points.points],
            "weights_normalised": method.points.normalised,
            "filter": {
                "a": list(method.low_pass.a),
                "b": list(method.low_pass.b),
                "corrected": method.low_pass.corrected,
            },
        },
        "sampler": "Poisson",
        "randomness": randomness,
        "reproducible_noise": reproducible,
        "not_accounted_for": [
            "tuning and repeated runs on the same records",
            "seeds or checkpoints chosen after seeing results",
            "preprocessing fitted on the private records",
            "stopping early because of results (the epsilon at planned steps covers it)",
        ],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "dp-accounting": version("dp-accounting"),
            "dp-pmlf": version("dp-pmlf"),
        },
    }
