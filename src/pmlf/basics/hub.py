"""Downloads from the Hugging Face hub, through its own client and cache: a file is fetched once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

TIMEOUT_SECONDS = 5.0


def snapshot(
    repository: str, kind: Literal["dataset", "model"], patterns: list[str], *, extra: str, instead: str
) -> Path:
    """Download the files of a hub repository, or find them in the hub's cache.

    Args:
        repository: The repository's id, "ylecun/mnist" for example.
        kind: Whether it is a dataset or a model.
        patterns: Which files, as glob patterns.
        extra: The optional dependency to name in an error ("text" for `pip install 'dp-pmlf[text]'`).
        instead: What to do without the hub, for an error.

    Returns:
        The folder that holds the files.

    Raises:
        ValueError: The client is not installed, or the hub cannot be reached and nothing is cached.
    """
    try:
        from huggingface_hub import HfApi, is_offline_mode, snapshot_download
    except ImportError as error:
        raise ValueError(
            f"fetching {repository!r} needs the package huggingface_hub: pip install 'dp-pmlf[{extra}]', or {instead}"
        ) from error
    try:
        if not is_offline_mode():
            # without this check the download retries for half a minute before it fails
            HfApi().repo_info(repository, repo_type=kind, timeout=TIMEOUT_SECONDS)
        return Path(snapshot_download(repository, repo_type=kind, allow_patterns=patterns))
    except Exception as error:  # its class depends on the HTTP library of the hub's client
        raise ValueError(
            f"cannot reach {repository!r} on the Hugging Face hub ({type(error).__name__}): {instead}, or set "
            "HF_HUB_OFFLINE=1 to use an earlier download"
        ) from error
