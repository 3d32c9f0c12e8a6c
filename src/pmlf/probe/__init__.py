"""Private linear models on precomputed features: `PrivateProbe`."""

from pmlf.probe.estimator import PrivateProbe
from pmlf.probe.shaping import FeatureBlock

__all__ = ["FeatureBlock", "PrivateProbe"]
