"""What a shape and a filter do to noise: variances against a long simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import signal

from pmlf.filters import LowPass
from pmlf.mechanism.shape_report import analyse_shape
from pmlf.shapes import banded

LOW_PASS = LowPass((-0.9,), (0.1,), corrected=False)


def test_the_variances_are_those_of_the_impulse_responses() -> None:
    shape = banded(4)
    report = analyse_shape(LOW_PASS, shape, 50)
    response = shape.noise_response(5000)
    assert report.power == pytest.approx(float(np.sum(response**2)), rel=1e-3)
    filtered = signal.lfilter(LOW_PASS.b, (1.0, *LOW_PASS.a), response)
    assert report.filtered_power == pytest.approx(float(np.sum(filtered**2)), rel=1e-3)
