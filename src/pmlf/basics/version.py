"""The version of this package. `pyproject.toml` is the only place where it is written."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

_DISTRIBUTION = "dp-pmlf"


@cache
def version() -> str:
    """The version of the installed package, or of the source tree if it is not installed.

    Returns:
        A version such as "0.1.0"; "unknown" for files without metadata.

    >>> version().split(".")[0]
    '0'
    """
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return of_source_tree(Path(__file__).resolve().parents[3])


def of_source_tree(folder: Path) -> str:
    """The version in a folder's pyproject.toml, if that is this project's."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return "unknown"
    return str(project["version"]) if project.get("name") == _DISTRIBUTION else "unknown"
