"""Datasets as tensors: the eight of the paper, a small one that comes with the package, and your own."""

from pmlf.data.catalogue import DEFAULT, IMAGE_DATASETS, NAMES, TEXT_DATASETS, ImageSpec, TextSpec
from pmlf.data.feature_files import FeatureForm
from pmlf.data.images import SPLITS, ImageData, ImageDataset, ImageItems, collate, load
from pmlf.data.pixels import ImageForm
from pmlf.data.sources import DATA_DIR_VARIABLE
from pmlf.data.tables import CategoryColumn, NumberColumn, Schema, TableDataset, load_table
from pmlf.data.targets import TASKS, Classes, LabelSet, Target, ValueRange
from pmlf.data.texts import Columns, TextData, TextForm, TokenDataset, load_text

__all__ = [
    "DATA_DIR_VARIABLE",
    "DEFAULT",
    "IMAGE_DATASETS",
    "NAMES",
    "SPLITS",
    "TASKS",
    "TEXT_DATASETS",
    "CategoryColumn",
    "Classes",
    "Columns",
    "FeatureForm",
    "ImageData",
    "ImageDataset",
    "ImageForm",
    "ImageItems",
    "ImageSpec",
    "LabelSet",
    "NumberColumn",
    "Schema",
    "TableDataset",
    "Target",
    "TextData",
    "TextForm",
    "TextSpec",
    "TokenDataset",
    "ValueRange",
    "collate",
    "load",
    "load_table",
    "load_text",
]
