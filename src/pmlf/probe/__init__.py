"""Private linear models on precomputed features: `PrivateProbe`."""

from pmlf.probe.conditioning import FeatureBlock
from pmlf.probe.estimator import PrivateProbe
from pmlf.probe.rows import FeatureRows
from pmlf.probe.training import advance_together

__all__ = ["FeatureBlock", "FeatureRows", "PrivateProbe", "advance_together"]
