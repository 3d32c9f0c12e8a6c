"""Fixed features of CIFAR-10 that have seen no real image: random patches of synthetic dead leaves as filters.

    python benchmarks/random_features.py ../shared/data/uoft-cs/cifar10 /tmp/cifar10-features.npz

6x6 patches at every second pixel, contrast-normalised and whitened by the covariance of synthetic patches; 128 of them
as filters; both signs rectified at 0.25; mean over 2x2 cells; square root; centred and scaled by the statistics of
synthetic images; a constant added; norm 1. So a record is a unit vector of 1,025 numbers, float16. Nothing depends on
the records.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PATCH, STRIDE, FILTERS, CELLS, THRESHOLD = 6, 2, 128, 2, 0.25


def dead_leaves(count: int, seed: int) -> Tensor:
    """Images of overlapping ellipses of power-law sizes, in random colours, from 0 to 255."""
    random = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(32), np.arange(32), indexing="ij"))
    images = np.empty((count, 3, 32, 32), dtype=np.float32)
    for image in images:
        base = random.uniform(40, 215)
        image[:] = base  # what no ellipse covers
        for _ in range(70):
            size = 1.5 * (1 - random.random() * (1 - (1.5 / 14) ** 0.2)) ** (-1 / 0.2)
            angle, aspect = random.uniform(0, np.pi), random.uniform(0.3, 1.0)
            away = grid - random.uniform(-4, 36, (2, 1, 1))
            along = np.cos(angle) * away[0] + np.sin(angle) * away[1]
            across = np.cos(angle) * away[1] - np.sin(angle) * away[0]
            inside = along**2 + (across / aspect) ** 2 < size**2
            colour = base + random.normal(0, 45) + random.normal(0, 18, 3)
            image[:, inside] = np.clip(colour, 0, 255)[:, None]
        image += random.normal(0, 3, image.shape)
    return torch.from_numpy(images)


class Features:
    """The map from images to features, made from synthetic images alone."""

    def __init__(self, seed: int = 0) -> None:
        synthetic = dead_leaves(600, seed)
        random = torch.Generator().manual_seed(seed)
        patches = F.unfold(synthetic, PATCH, stride=4).transpose(1, 2).reshape(-1, 3 * PATCH**2)
        patches = patches[torch.randperm(len(patches), generator=random)[:40_000]]
        deviation = patches.std(1)
        patches = (patches - patches.mean(1, keepdim=True)) / (patches.var(1, keepdim=True) + 10).sqrt()
        values, vectors = torch.linalg.eigh(patches.T.cov())
        whitening = vectors @ torch.diag((values + 0.1).rsqrt()) @ vectors.T
        chosen = patches[torch.nonzero(deviation > 12)[:FILTERS, 0]] @ whitening
        filters = whitening @ F.normalize(chosen, dim=1).T
        self.filters = (filters / (patches @ filters).std(0)).T.reshape(FILTERS, 3, PATCH, PATCH).contiguous()
        raw = torch.cat([self.raw(part) for part in synthetic.split(100)])
        self.mean, self.scale = raw.mean(0), raw.std(0) + 1e-3

    def raw(self, images: Tensor) -> Tensor:
        ones = torch.full((1, 3, PATCH, PATCH), 1 / (3 * PATCH**2))
        mean, square = (F.conv2d(values, ones, stride=STRIDE) for values in (images, images**2))
        deviation = ((square - mean**2).clamp(min=0) + 10).sqrt()
        centred = F.conv2d(images, self.filters, stride=STRIDE) - mean * self.filters.sum((1, 2, 3)).view(1, -1, 1, 1)
        z = centred / deviation
        both = torch.cat([F.relu(z - THRESHOLD), F.relu(-z - THRESHOLD)], 1)
        return F.adaptive_avg_pool2d(both, CELLS).flatten(1).sqrt()

    def __call__(self, images: Tensor) -> Tensor:
        found = (self.raw(images) - self.mean) / self.scale
        found = torch.cat([found, torch.full((len(found), 1), 0.1 * found.shape[1] ** 0.5)], 1)
        return F.normalize(found, dim=1).half()


def main() -> None:
    from datasets import load_dataset

    torch.set_num_threads(1)
    source, target = sys.argv[1], Path(sys.argv[2])
    features, stored = Features(), {}
    for split in ("train", "test"):
        rows = load_dataset(source, split=split)
        stored[f"{split}_labels"] = np.asarray(rows["label"], dtype=np.int64)
        parts = []
        for start in range(0, len(rows), 200):
            images = np.stack([np.asarray(image) for image in rows[start : start + 200]["img"]])
            parts.append(features(torch.from_numpy(images).permute(0, 3, 1, 2).float()).numpy())
        stored[split] = np.concatenate(parts)
    np.savez(target, **stored)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
