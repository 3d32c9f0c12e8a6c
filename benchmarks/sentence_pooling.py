"""Which pooled hidden states of a frozen encoder serve a private linear model best, on held-out training phrases.

python benchmarks/sentence_pooling.py --model DIR --data-dir DATA --out dev/results/sentence-pooling.json

The training split of SST-2 has sentences and parts of them, the validation split sentences only. So the records that
are held out have at least 10 tokens, and no record that is trained on has five tokens in a row in common with one of
them. Training takes the rest of the first 20,000 phrases, with the noise that all 67,349 have at epsilon 1. Every
combination of poolings is trained with every setting.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from pmlf import data, machine, priors
from pmlf.basics.files import write_json
from pmlf.data.texts import Padding
from pmlf.experiments.linear_features import embedding_recipe
from pmlf.models.encoders import Pooling, SentenceEncoder
from pmlf.priors.extraction import digest_of
from pmlf.probe import FeatureRows
from prior_linear import as_if, trained

RECORDS, ALL_RECORDS, HELD_OUT = 20_000, 67_349, 2_500
LONG, COMMON = 10, 5  # tokens
EVERY: Pooling = tuple((name, -layer) for name in ("mean", "maximum", "first") for layer in range(1, 7))
CANDIDATES: Mapping[str, Pooling] = {
    "mean of the last layer": EVERY[:1],
    "means of the last 2 layers": EVERY[:2],
    "means of the last 3 layers": EVERY[:3],
    "means of the last 4 layers": EVERY[:4],
    "means of all 6 layers": EVERY[:6],
    "means of layers 3 to 5": EVERY[1:4],
    "mean and maximum of the last layer": (("mean", -1), ("maximum", -1)),
    "mean and first of the last layer": (("mean", -1), ("first", -1)),
    "means and maxima of the last 2 layers": (*EVERY[:2], *EVERY[6:8]),
    "means and firsts of the last 4 layers": (*EVERY[:4], *EVERY[12:16]),
    "means and maxima of the last 4 layers": (*EVERY[:4], *EVERY[6:10]),
    "means of the last 4 layers, first of the last": (*EVERY[:4], ("first", -1)),
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"clip_norm": 1.0},
    {"whitening": 0.5},
    {"score_noise": 1.8},
)


def separated(tokens: list[tuple[int, ...]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places to train on and places held out: long ones, which share no run of tokens with the others."""
    held = [place for place, each in enumerate(tokens) if len(each) >= LONG][:HELD_OUT]
    seen = {run for place in held for run in _runs(tokens[place])}
    chosen = set(held)
    kept = [
        place
        for place, each in enumerate(tokens)
        if place not in chosen and not any(run in seen for run in _runs(each))
    ]
    return np.array(kept), np.array(held)


def _runs(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tokens[start : start + COMMON] for start in range(len(tokens) - COMMON + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the folder of an encoder of texts")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    loaded = SentenceEncoder.load(str(arguments.model))
    encoder = SentenceEncoder(loaded.inner, loaded.tokenizer, loaded.longest, pooling=EVERY)
    texts = data.load_text("sst2", arguments.data_dir)
    tokens = texts.tokenised("train", encoder.tokenizer, longest=encoder.longest, cut=False)
    began = time.process_time()
    features = priors.embed(
        encoder,
        Subset(tokens, range(RECORDS)),
        Padding(encoder.tokenizer.pad_token_id),
        contents=digest_of(tokens.arrays()),
        lengths=tokens.lengths[:RECORDS],
        progress=lambda done, of: print(f"{done} of {of} texts", flush=True),
    )
    seconds = time.process_time() - began
    kept, held = separated([tuple(tokens[place][0].tolist()[1:-1]) for place in range(RECORDS)])
    labels = tokens.labels.numpy()[:RECORDS]
    width = features.shape[1] // len(EVERY)
    document: dict[str, Any] = {
        "command": "python benchmarks/sentence_pooling.py",
        "machine": machine.describe("torch", "numpy"),
        "records": len(kept),
        "noise_of_records": ALL_RECORDS,
        "held_out": len(held),
        "features_processor_seconds": seconds,
        "runs": [],
    }
    for name, pooling in CANDIDATES.items():
        places = [EVERY.index(each) for each in pooling]
        columns = np.concatenate([np.arange(place * width, (place + 1) * width) for place in places])
        epsilon = as_if(1.0, len(kept), ALL_RECORDS)
        settings = [
            {**embedding_recipe(len(columns), 1.0, blocks=len(pooling)), **each, "epsilon": epsilon, "classes": 2}
            for each in SETTINGS
        ]
        chosen = features[:, columns]
        fitted = trained(settings, FeatureRows(chosen[kept]), labels[kept], seed=0)
        for changes, (_, probe, _) in zip(SETTINGS, fitted, strict=True):
            row = {"pooling": name, **changes, "learning_rate": probe.learning_rate_}
            document["runs"].append(row | {"accuracy": probe.score(chosen[held], labels[held])})
            print(document["runs"][-1], flush=True)
        write_json(arguments.out, document, released=True)


if __name__ == "__main__":
    main()
