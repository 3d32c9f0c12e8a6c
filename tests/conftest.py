"""What every test shares: threads under xdist, seeds, and where real data is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker a core: more threads than that only fight


def pytest_collectstart() -> None:
    """A model that a module makes for its tests' parameters is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests decode is neither found in the user's cache nor left there; xdist's workers share it."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PMLF_CACHE", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"))
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test's models and batches are the same alone as after others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """A folder of real datasets laid out as the hub lays them out, or None: PMLF_DATA, or ../shared/data."""
    given = os.environ.get("PMLF_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None
