"""Datasets as tensors: the eight of the paper, a small one that comes with the package, and your own."""

from pmlf.data.catalogue import DEFAULT, IMAGE_DATASETS, NAMES, TEXT_DATASETS, ImageSpec, TextSpec
from pmlf.data.images import SPLITS, ImageData, ImageDataset, ImageItems, collate, load
from pmlf.data.sources import DATA_DIR_VARIABLE
from pmlf.data.texts import Columns, TextData, TokenDataset, load_text

__all__ = [
    "DATA_DIR_VARIABLE",
    "DEFAULT",
    "IMAGE_DATASETS",
    "NAMES",
    "SPLITS",
    "TEXT_DATASETS",
    "Columns",
    "ImageData",
    "ImageDataset",
    "ImageItems",
    "ImageSpec",
    "TextData",
    "TextSpec",
    "TokenDataset",
    "collate",
    "load",
    "load_text",
]
