"""The time of a private probe's steps against the same matrix products without privacy, interleaved.

A step is two products, features times weights and transposed features times residuals. The reference does exactly
these in float32 on the whole matrix. Both alternate, so that the load of the machine falls on both; the ratio of the
medians is reported. Rows repeat a random block: times do not depend on the values.

    python benchmarks/probe_speed.py --records 50000 --width 16896 --classes 10 --rounds 3 --dtype float16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from pmlf.probe import PrivateProbe


def features(records: int, width: int, dtype: str) -> np.ndarray:
    """A matrix of repeated random rows."""
    block = np.random.default_rng(0).normal(size=(min(records, 500), width)).astype(dtype)
    found = np.empty((records, width), dtype=dtype)
    for start in range(0, records, len(block)):
        found[start : start + len(block)] = block[: records - start]
    return found


def main() -> None:
    """Measure and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=16_896)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float16", "float32"))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    X = features(options.records, options.width, options.dtype)
    y = np.random.default_rng(1).integers(options.classes, size=options.records)
    probe = PrivateProbe(classes=options.classes, steps=30, random_state=0)

    began = time.perf_counter()
    training = probe.begin(X, y)
    training.advance()  # mean
    training.advance()  # second moments
    training.advance()  # the first step also measures the norms of all records
    before = time.perf_counter() - began

    plain = torch.from_numpy(X if options.dtype == "float32" else X[: options.records // 2].astype(np.float32))
    share = len(plain) / options.records  # half of the rows, if the whole matrix does not fit in float32
    weights = torch.randn(options.width, options.classes)
    residuals = torch.randn(len(plain), options.classes)
    private_times, plain_times = [], []
    for _ in range(options.rounds):
        began = time.perf_counter()
        training.advance()
        private_times.append(time.perf_counter() - began)
        began = time.perf_counter()
        _ = plain @ weights
        _ = plain.T @ residuals
        plain_times.append((time.perf_counter() - began) / share)
    step, product = statistics.median(private_times), statistics.median(plain_times)
    document = {
        **{name: getattr(options, name) for name in ("records", "width", "classes", "rounds", "dtype")},
        "threads": torch.get_num_threads(),
        "ratio_of_a_step": step / product,
        "ratio_of_30_steps_with_mean_moments_and_norms": (before + 29 * step) / (30 * product),
        "seconds": {"step": private_times, "products": plain_times, "until_the_first_step": before},
    }
    print(json.dumps(document, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
