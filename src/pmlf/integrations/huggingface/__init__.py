"""Private training in `transformers.Trainer`: `PrivateTrainer` with `PrivacyArguments`.

    privacy = PrivacyArguments(target_epsilon=3.0)
    PrivateTrainer(model, TrainingArguments(...), train_dataset=..., privacy=privacy).train()

It needs `transformers` and `accelerate`: pip install 'dp-pmlf[text]'.
"""

try:
    import accelerate as _accelerate  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:  # the extra is optional
    raise ImportError(
        f"pmlf.integrations.huggingface needs {error.name}, which is not installed: pip install 'dp-pmlf[text]'"
    ) from error

from pmlf.integrations.huggingface.arguments import PrivacyArguments
from pmlf.integrations.huggingface.trainer import PrivateTrainer

__all__ = ["PrivacyArguments", "PrivateTrainer"]
