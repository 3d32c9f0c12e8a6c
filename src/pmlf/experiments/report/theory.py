"""What the theory predicts beside what an instrumented run measured."""

from __future__ import annotations

from typing import Any


def view(document: dict[str, Any]) -> dict[str, Any]:
    """Charts and a table of one instrumented run."""
    return {"title": "", "charts": [], "rows": []}
