"""The ways to clip what a sample adds to a sum."""

from __future__ import annotations

from typing import Literal

Clipping = Literal["flat", "automatic", "per-layer"]
CLIPPINGS: tuple[Clipping, ...] = ("flat", "automatic", "per-layer")
