"""Fine-tune a text classifier privately. The model is a tiny RoBERTa with random weights, so nothing is downloaded.

    python examples/text_finetuning.py

For a real model, load it by `from_pretrained` in place of building it from a configuration.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForSequenceClassification

import pmlf

GOOD = ("good", "great", "warm", "clever", "lovely")
BAD = ("bad", "dull", "cold", "stupid", "ugly")
OTHER = ("the", "film", "plot", "cast", "is", "was", "and", "very", "rather", "in")
WORDS = ("<s>", "<pad>", "</s>", *GOOD, *BAD, *OTHER)
LENGTH = 8


def review() -> dict[str, Tensor]:
    """One short review as token numbers, with its label: 1 is good."""
    label = random.randrange(2)
    words = [random.choice(OTHER) for _ in range(random.randrange(1, 4))]
    words += random.choices(GOOD if label else BAD, k=3)
    random.shuffle(words)
    tokens = ["<s>", *words, "</s>"]
    padded = tokens + ["<pad>"] * (LENGTH - len(tokens))
    return {
        "input_ids": torch.tensor([WORDS.index(word) for word in padded]),
        "attention_mask": torch.tensor([word != "<pad>" for word in padded]).long(),
        "labels": torch.tensor(label),
    }


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One loss per sample. The model's own `.loss` is a mean over the batch, which is refused."""
    return F.cross_entropy(logits(model, batch), batch["labels"], reduction="none")


def main() -> None:
    train, test = [review() for _ in range(1500)], [review() for _ in range(400)]
    config = RobertaConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH + 2, pad_token_id=1, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
    )  # fmt: skip
    model = RobertaForSequenceClassification(config)
    run = pmlf.make_private(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        dataset=train,
        loss_fn=loss_fn,
        method="dpsgd",
        target_epsilon=8.0,
        target_delta=1e-5,
        batch_size=250,
        epochs=4,
    )
    for batch in run.batches():
        run.step(batch)
    accuracy = pmlf.evaluate(model, test, logits=logits, labels=lambda batch: batch["labels"])
    print(f"epsilon {run.epsilon():.2f}, test accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
