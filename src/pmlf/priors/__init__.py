"""Priors: features of images, made from synthetic images alone. They know nothing of the private part."""

from pmlf.priors.colours import ColourSpec
from pmlf.priors.extraction import extract
from pmlf.priors.patches import PatchSpec
from pmlf.priors.prior import ImagePrior, PriorBlock, PriorSpec
from pmlf.priors.synthetic import synthetic_images

__all__ = ["ColourSpec", "ImagePrior", "PatchSpec", "PriorBlock", "PriorSpec", "extract", "synthetic_images"]
