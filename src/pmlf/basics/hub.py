"""Files of the Hugging Face hub, by its own client and in its own cache: downloaded once, found again offline."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

TIMEOUT_SECONDS = 5.0


def snapshot(
    repository: str, kind: Literal["dataset", "model"], patterns: list[str], *, extra: str, instead: str
) -> Path:
    """A folder with the files of a repository that match; `extra` and `instead` are what its errors advise."""
    try:
        from huggingface_hub import HfApi, is_offline_mode, snapshot_download
    except ImportError as error:
        raise ValueError(
            f"fetching {repository!r} needs the package huggingface_hub: pip install 'dp-pmlf[{extra}]', or {instead}"
        ) from error
    try:
        if not is_offline_mode():
            # by itself the download would try again for half a minute before it gives up
            HfApi().repo_info(repository, repo_type=kind, timeout=TIMEOUT_SECONDS)
        return Path(snapshot_download(repository, repo_type=kind, allow_patterns=patterns))
    except Exception as error:  # whose class depends on the HTTP library below the hub's client
        raise ValueError(
            f"cannot reach {repository!r} on the Hugging Face hub ({type(error).__name__}): {instead}, or set "
            "HF_HUB_OFFLINE=1 to use an earlier download"
        ) from error
