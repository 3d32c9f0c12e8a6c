"""The error that all ranks raise together. Importing this module does not import torch."""

from __future__ import annotations


class RankFailed(RuntimeError):
    """A rank has failed or cannot be reached, so no rank releases anything in this step."""
