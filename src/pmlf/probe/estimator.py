"""`PrivateProbe`: a private linear model on precomputed features, with the conventions of scikit-learn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from pmlf.basics.arguments import plain, warn_of_large_delta
from pmlf.evidence.budget import BudgetGuard
from pmlf.evidence.certificate import sealed
from pmlf.evidence.ledger import Ledger
from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.noise import randomness_from_seed
from pmlf.probe import conventions
from pmlf.probe.conditioning import FeatureBlock, checked_blocks
from pmlf.probe.heads import HEADS
from pmlf.probe.labels import declared
from pmlf.probe.rows import FeatureRows
from pmlf.probe.settings import ProbeSettings
from pmlf.probe.training import ProbeModel, ProbeTraining

if TYPE_CHECKING:
    from sklearn.utils import Tags

_RECIPE_FILTER = LowPass(a=(-0.8,), b=(0.2,), corrected=False)


class PrivateProbe:
    """W <- W - eta_t V_t, V_t = filter((sum_i clip(w_i (x) (p_i - y_i), C) + z C N(0, I)) / n): a private linear model.

    Every record x is centred and scaled to a unit vector w by a private mean and private second moments. Mean, second
    moments and all steps are one privacy plan: (epsilon, delta) covers everything that `fit` releases, for adding or
    removing one record. The number of records, the classes and the range of targets are public: declare them.

    Whatever you compute from the private records before `fit` is not covered. A `StandardScaler` or `PCA` in front of
    the probe leaks; the probe centres and scales by itself, privately.

    Args:
        head: "softmax" (classes), "sigmoid" (two classes, or a column of 0 and 1 per label) or "least-squares".
        classes: All possible classes, or their number; "from-labels" if the set of labels is public.
        target_range: The smallest and the largest possible target of "least-squares"; targets outside are clipped.
        epsilon: The privacy budget of `fit`.
        delta: The probability at which epsilon is stated; below 1/n.
        steps: The number of steps, T.
        batch_size: The expected batch size of Poisson sampling; None for full batches, which are more accurate.
        clip_norm: C, the bound on a record's gradient.
        learning_rate: eta; None derives it from public numbers, so that the noise in a score is `score_noise`.
        score_noise: The standard deviation of the noise in a unit vector's score after all steps, if no learning rate
            is given. More of it means larger steps.
        low_pass: The filter of the noisy gradients; None for {-0.8}{0.2} without correction.
        schedule: "cosine" or "constant".
        averaging: The share of the last iterates whose mean is the model; 0 takes the last iterate.
        mean_share: The share of the budget for the private mean; 0 for none.
        moments_share: The share of the budget for the private second moments; 0 for none.
        moment_clip: The bound on the norm of a record's squared coordinates, in units of 1/sqrt(d).
        whitening: How far the spectrum of the features is flattened, from 0 to 1.
        intercept: The share of a constant in every record's squared norm; 0 for no intercept.
        blocks: Columns that are conditioned separately; None for one block.
        ledger: A ledger file that all runs on these records share; None counts in memory.
        dataset: The name of the dataset in the ledger.
        random_state: None for cryptographic noise; a number for reproducible experiments, not for release.

    Attributes:
        classes_: The classes, of a classifier.
        coef_: Weights of the conditioned coordinates, one row per output.
        n_features_in_: The number of features.
        n_iter_: The number of steps taken.
        epsilon_: The epsilon that the certificate states.
        noise_multiplier_: z of the steps.
        learning_rate_: eta of the steps.
        certificate_: The certificate, JSON-ready.

    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(2, size=2000)
    >>> X = rng.normal(size=(2000, 8)) + 3 * y[:, None] * np.eye(8)[0]
    >>> probe = PrivateProbe(classes=2, epsilon=2.0, random_state=0).fit(X, y)
    >>> bool(probe.score(X, y) > 0.85), probe.epsilon_ <= 2.0
    (True, True)
    """

    def __init__(
        self,
        *,
        head: str = "softmax",
        classes: Sequence[Any] | int | str | None = None,
        target_range: tuple[float, float] | None = None,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        steps: int = 30,
        batch_size: int | None = None,
        clip_norm: float = 0.3,
        learning_rate: float | None = None,
        score_noise: float = 0.9,
        low_pass: LowPass | None = None,
        schedule: str = "cosine",
        averaging: float = 0.0,
        mean_share: float = 0.07,
        moments_share: float = 0.04,
        moment_clip: float = 2.5,
        whitening: float = 0.9,
        intercept: float = 0.0,
        blocks: Sequence[FeatureBlock] | None = None,
        ledger: str | Path | None = None,
        dataset: str = "features",
        random_state: int | None = None,
    ) -> None:
        self.head = head
        self.classes = classes
        self.target_range = target_range
        self.epsilon = epsilon
        self.delta = delta
        self.steps = steps
        self.batch_size = batch_size
        self.clip_norm = clip_norm
        self.learning_rate = learning_rate
        self.score_noise = score_noise
        self.low_pass = low_pass
        self.schedule = schedule
        self.averaging = averaging
        self.mean_share = mean_share
        self.moments_share = moments_share
        self.moment_clip = moment_clip
        self.whitening = whitening
        self.intercept = intercept
        self.blocks = blocks
        self.ledger = ledger
        self.dataset = dataset
        self.random_state = random_state

    def __repr__(self) -> str:
        return conventions.shown(self)

    def __sklearn_tags__(self) -> Tags:
        return conventions.tags(regressor=self.head == "least-squares", several=self.head == "sigmoid")

    @classmethod
    def _parameters(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters by name, as scikit-learn asks for them."""
        return {name: getattr(self, name) for name in self._parameters()}

    def set_params(self, **params: Any) -> Self:
        """Change parameters by name.

        Raises:
            ValueError: There is no parameter of that name.
        """
        for name, value in params.items():
            if name not in self._parameters():
                raise ValueError(f"{name!r} is not a parameter of PrivateProbe: there are {self._parameters()}")
            setattr(self, name, value)
        return self

    def fit(self, X: Any, y: Any) -> Self:
        """Train privately. Everything that the fitted probe holds is covered by epsilon.

        Args:
            X: Features of shape (n, d): an array, a memory map, a tensor or a data frame. A record with NaN or
                infinity contributes nothing.
            y: Labels (n,), a matrix of 0 and 1 (n, K) for several labels, or targets.

        Returns:
            The fitted probe.

        Raises:
            ValueError: A parameter, or the shape of X or y, is refused.
        """
        with nullcontext() if self.ledger is None else Ledger(self.ledger, dataset=self.dataset) as ledger:
            training = self.begin(X, y, ledger=ledger)
            while training.advance():
                pass
            self.finish(training)
        conventions.keep_names(self, X)
        return self

    def begin(
        self, X: Any, y: Any, *, ledger: Ledger | None = None, resumed: Mapping[str, Any] | None = None
    ) -> ProbeTraining:
        """The training of these records before its first release, for your own loop; `fit` is this:

            training = probe.begin(X, y)
            while training.advance():
                checkpoint.save(path, training.state_dict())
            probe.finish(training)

        Args:
            X: As in `fit`, and so is `y`; or `FeatureRows`, which several trainings can share.
            ledger: An open ledger; None counts in memory.
            resumed: What `training.state_dict()` returned, to continue from there.

        Returns:
            The training.

        Raises:
            ValueError: As in `fit`; or the saved state is of other settings or of another ledger.
        """
        labels = conventions.labels(y, regression=self.head == "least-squares")
        rows = X if isinstance(X, FeatureRows) else FeatureRows(X)
        if len(labels) != rows.records:
            raise ValueError(f"X has {rows.records} records and y has {len(labels)}: give one label per record")
        self._declared = declared(self.head, self.classes, self.target_range, labels)
        settings = self._settings(rows.records, checked_blocks(self.blocks, rows.width), self._declared.outputs)
        randomness = randomness_from_seed(plain(self.random_state), name="random_state")
        if resumed is not None:
            plan = settings.planned(resumed["noise"])
        else:
            plan = settings.plan({} if ledger is None else ledger.tally.events)
        budget = BudgetGuard(plan, replayable=randomness.reproducible, ledger=ledger)
        training = ProbeTraining(rows, self._declared.encoded(labels), settings, budget, randomness)
        if resumed is not None:
            training.load_state_dict(resumed)
        return training

    def _settings(self, records: int, blocks: tuple[FeatureBlock, ...], outputs: int) -> ProbeSettings:
        shared = [
            name for name in ProbeSettings.__dataclass_fields__ if name in self._parameters() and name != "blocks"
        ]
        given = {name: getattr(self, name) for name in shared}
        given["low_pass"] = _RECIPE_FILTER if self.low_pass is None else self.low_pass
        if self.delta is not None:
            warn_of_large_delta("delta", self.delta, records, stacklevel=4)
        return ProbeSettings(**given, records=records, blocks=blocks, outputs=outputs)

    def finish(self, training: ProbeTraining) -> Self:
        """Take over what a training has released, and nothing else: the probe is then fitted."""
        self.model_: ProbeModel = training.model()
        self.certificate_ = self._certified(training.certificate())
        self.epsilon_ = self.certificate_["epsilon"]
        self.noise_multiplier_ = training.budget.plan.event.noise_multiplier
        self.learning_rate_ = training.learning_rate
        self.n_iter_ = training.steps_done
        self.coef_: NDArray[np.float64] = self.model_.weights.T.numpy()
        self.n_features_in_ = sum(each.block.width for each in self.model_.conditioning)
        if self._declared.classes is not None:
            self.classes_ = self._declared.classes
        return self

    def _certified(self, document: dict[str, Any]) -> dict[str, Any]:
        """The certificate, which says so if the classes are those of the records."""
        if not isinstance(self.classes, str):
            return document
        left_out = [*document["not_accounted_for"], "the set of classes, which was taken from the labels"]
        return sealed({**document, "not_accounted_for": left_out})

    def _scores(self, X: Any) -> torch.Tensor:
        if "model_" not in vars(self):
            raise conventions.not_fitted("this PrivateProbe is not fitted: call fit(X, y) first")
        conventions.check_names(self, X)
        rows = FeatureRows(X)
        if rows.width != self.n_features_in_:
            raise ValueError(
                f"X has {rows.width} features, but PrivateProbe is expecting {self.n_features_in_} features as input"
            )
        return self.model_.scores(rows)

    @property
    def decision_function(self) -> Callable[[Any], NDArray[Any]]:
        """The scores of records, of a classifier: X -> (n,) for two classes, otherwise (n, K).

        Raises:
            AttributeError: The head is "least-squares".
        """
        self._require_classifier("decision_function")
        return self._decisions

    def _decisions(self, X: Any) -> NDArray[Any]:
        scores = self._scores(X).numpy()
        if self._declared.several or scores.shape[1] > 2:
            return scores
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores[:, 0]

    def predict(self, X: Any) -> NDArray[Any]:
        """The predicted labels or targets.

        Raises:
            ValueError: The probe is not fitted, or X has another number of features.
        """
        return self._declared_after_fit().decoded(self._scores(X))

    @property
    def predict_proba(self) -> Callable[[Any], NDArray[Any]]:
        """The predicted probabilities of the classes, of a classifier: X -> (n, K).

        Raises:
            AttributeError: The head is "least-squares".
        """
        self._require_classifier("predict_proba")
        return self._probabilities

    def _require_classifier(self, name: str) -> None:
        if self.head == "least-squares":
            raise AttributeError(f"head='least-squares' has no {name}: call predict")

    def _probabilities(self, X: Any) -> NDArray[Any]:
        found = HEADS[self.head].link(self._scores(X).double()).numpy()
        return found if self._declared.several or found.shape[1] > 1 else np.hstack([1 - found, found])

    def score(self, X: Any, y: Any) -> float:
        """The accuracy of a classifier (of all labels of a record at once), R^2 of a regression.

        The score on the training records is not covered by epsilon.
        """
        predicted = self.predict(X)
        if self.head != "least-squares":
            same = np.asarray(y) == predicted
            return float(np.mean(same.all(axis=1) if same.ndim == 2 else same))
        targets = np.asarray(y, dtype=np.float64)
        total = ((targets - targets.mean(axis=0)) ** 2).sum()
        return float(1 - ((targets - predicted) ** 2).sum() / total) if total > 0 else 0.0

    def _declared_after_fit(self) -> Any:
        if "model_" not in vars(self):
            raise conventions.not_fitted("this PrivateProbe is not fitted: call fit(X, y) first")
        return self._declared
