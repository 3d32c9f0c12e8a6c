"""The pictures of `pmlf filter`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmlf.cli.filter_pictures import plot_filter, plot_shape
from pmlf.filters import LowPass
from pmlf.shapes import banded

INNER_OUTER = LowPass(a=(-0.9,), b=(1.0,), corrected=False)
DIFFERENCE = LowPass(b=(1.0, -1.0), corrected=False)  # of DC gain 0


@pytest.mark.parametrize("low_pass", [LowPass(), INNER_OUTER, DIFFERENCE], ids=str)
def test_a_filter_is_drawn(low_pass: LowPass, tmp_path: Path) -> None:
    plot_filter(low_pass, tmp_path / "filter.png")
    assert (tmp_path / "filter.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_spectra_of_a_noise_shape_are_drawn(tmp_path: Path) -> None:
    plot_shape(LowPass((-0.9,), (0.1,), corrected=False), banded(2), tmp_path / "shape.png")
    assert (tmp_path / "shape.png").stat().st_size > 10_000
