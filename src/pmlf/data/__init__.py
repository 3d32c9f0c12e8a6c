"""Datasets as tensors: the eight of the paper, a small one that comes with the package, and your own."""

from pmlf.data.catalogue import DEFAULT, IMAGE_DATASETS, NAMES, TEXT_DATASETS, ImageSpec, TextSpec
from pmlf.data.feature_files import FeatureForm
from pmlf.data.images import SPLITS, ImageData, ImageDataset, ImageItems, collate, load
from pmlf.data.language import CausalPadding, LanguageForm, load_language
from pmlf.data.pixels import ImageForm
from pmlf.data.sources import DATA_DIR_VARIABLE
from pmlf.data.tables import CategoryColumn, NumberColumn, Schema, TableDataset, load_table
from pmlf.data.targets import TASKS, AnyTarget, Classes, LabelSet, NextToken, Target, ValueRange
from pmlf.data.texts import Columns, TextData, TextForm, TokenDataset, load_text
from pmlf.data.unit_column import refuse_unit_folders, unit_column

__all__ = [
    "DATA_DIR_VARIABLE",
    "DEFAULT",
    "IMAGE_DATASETS",
    "NAMES",
    "SPLITS",
    "TASKS",
    "TEXT_DATASETS",
    "AnyTarget",
    "CategoryColumn",
    "CausalPadding",
    "Classes",
    "Columns",
    "FeatureForm",
    "ImageData",
    "ImageDataset",
    "ImageForm",
    "ImageItems",
    "ImageSpec",
    "LabelSet",
    "LanguageForm",
    "NextToken",
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
    "load_language",
    "load_table",
    "load_text",
    "refuse_unit_folders",
    "unit_column",
]
