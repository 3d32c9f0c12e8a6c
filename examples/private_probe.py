"""A private linear model on features: fit, score, certificate, and what a second run on the same records costs.

Run it: python examples/private_probe.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from pmlf.probe import PrivateProbe


def main() -> None:
    """Train two probes that share one budget."""
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=6000)
    X = (rng.normal(size=(6000, 64)) + 2 * np.eye(64)[y]).astype(np.float16)  # stands in for embeddings
    train, test = slice(0, 5000), slice(5000, None)

    ledger = Path(tempfile.mkdtemp()) / "patients.ledger"
    probe = PrivateProbe(classes=3, epsilon=1.0, delta=1e-5, ledger=ledger, dataset="patients")
    probe.fit(X[train], y[train])
    print(f"accuracy {probe.score(X[test], y[test]):.3f} at epsilon {probe.epsilon_:.4f}")
    for query in probe.certificate_["queries"]:
        print(f"released before the steps: {query['name']}, noise multiplier {query['noise_multiplier']:.1f}")
    print(f"released: {probe.certificate_['released_steps']} steps, noise multiplier {probe.noise_multiplier_:.1f}")

    again = PrivateProbe(classes=3, epsilon=3.0, delta=1e-5, ledger=ledger, dataset="patients")
    again.fit(X[train], y[train])
    print(f"both probes together: epsilon {again.epsilon_:.4f}")


if __name__ == "__main__":
    main()
