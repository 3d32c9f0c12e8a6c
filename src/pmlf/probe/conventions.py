"""What scikit-learn asks of an estimator, without needing scikit-learn itself."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sklearn.utils import Tags


def tags(*, regressor: bool, several: bool) -> Tags:
    """The tags of a probe. NaN is allowed: a record with NaN contributes nothing."""
    from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags

    return Tags(
        estimator_type="regressor" if regressor else "classifier",
        target_tags=TargetTags(required=True, multi_output=regressor),
        classifier_tags=None if regressor else ClassifierTags(multi_label=several),
        regressor_tags=RegressorTags() if regressor else None,
        input_tags=InputTags(allow_nan=True),
    )


def shown(estimator: Any) -> str:
    """The constructor call with the parameters that differ from their defaults."""
    defaults = {name: p.default for name, p in inspect.signature(type(estimator)).parameters.items()}
    given = estimator.get_params()
    changed = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not defaults[name])
    return f"{type(estimator).__name__}({changed})"


def not_fitted(message: str) -> Exception:
    """scikit-learn's NotFittedError where it is installed, otherwise a ValueError."""
    try:
        from sklearn.exceptions import NotFittedError
    except ImportError:
        return ValueError(message)
    return NotFittedError(message)


def labels(y: Any, *, regression: bool) -> NDArray[Any]:
    """Labels as an array of one or two dimensions. A single column of labels is flattened, with a warning.

    Raises:
        ValueError: There are none, or they are continuous numbers for a classifier.
    """
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None: give one label per record")
    found = np.asarray(y)
    if found.ndim == 2 and found.shape[1] == 1:
        warnings.warn("A column-vector y was passed when a 1d array was expected: it is flattened", _warning(), 4)
        found = found[:, 0]
    if found.ndim not in (1, 2):
        raise ValueError(f"y has {found.ndim} dimensions: give one label per record, or one column per label")
    if np.iscomplexobj(found):
        raise ValueError("Complex data not supported: give real labels")
    if not regression and found.dtype.kind == "f" and not _whole(found):
        raise ValueError("Unknown label type: continuous numbers were given to a classifier, give head='least-squares'")
    return found


def _whole(numbers: NDArray[Any]) -> bool:
    return bool(np.isfinite(numbers).all() and (numbers == np.floor(numbers)).all())


def _warning() -> type[Warning]:
    try:
        from sklearn.exceptions import DataConversionWarning
    except ImportError:
        return UserWarning
    return DataConversionWarning


def keep_names(estimator: Any, X: Any) -> None:
    """Remember the names of a data frame's columns."""
    names = _names(X)
    if names is not None:
        estimator.feature_names_in_ = names
    elif "feature_names_in_" in vars(estimator):
        del estimator.feature_names_in_


def check_names(estimator: Any, X: Any) -> None:
    """Refuse a data frame with other columns than those of `fit`.

    Raises:
        ValueError: The names differ.
    """
    known, names = vars(estimator).get("feature_names_in_"), _names(X)
    name = type(estimator).__name__
    if known is None and names is not None:
        warnings.warn(f"X has feature names, but {name} was fitted without feature names", UserWarning, 4)
    if known is not None and names is None:
        warnings.warn(f"X does not have valid feature names, but {name} was fitted with feature names", UserWarning, 4)
    if known is not None and names is not None and list(names) != list(known):
        unseen = [each for each in names if each not in known]
        missing = [each for each in known if each not in names]
        message = "The feature names should match those that were passed during fit.\n"
        for title, found in (("unseen at fit time", unseen), ("seen at fit time, yet now missing", missing)):
            if found:
                message += f"Feature names {title}:\n" + "".join(f"- {each}\n" for each in found[:5])
        if not unseen and not missing:
            message += "Feature names must be in the same order as they were in fit.\n"
        raise ValueError(message)


def _names(X: Any) -> NDArray[Any] | None:
    columns = getattr(X, "columns", None)
    if columns is None or not all(isinstance(name, str) for name in columns):
        return None
    return np.asarray(columns, dtype=object)
