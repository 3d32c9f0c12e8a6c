"""Priors: features of records from synthetic images or frozen encoders. They know nothing of the private part."""

from pmlf.priors.colours import ColourSpec
from pmlf.priors.extraction import embed, extract
from pmlf.priors.patches import PatchSpec
from pmlf.priors.prior import BlockSpec, ImagePrior, PriorBlock, PriorSpec
from pmlf.priors.scattering import ScatteringSpec
from pmlf.priors.synthetic import synthetic_images

__all__ = [
    "BlockSpec",
    "ColourSpec",
    "ImagePrior",
    "PatchSpec",
    "PriorBlock",
    "PriorSpec",
    "ScatteringSpec",
    "embed",
    "extract",
    "synthetic_images",
]
