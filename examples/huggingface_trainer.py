"""Fine-tune a text classifier privately with `transformers.Trainer`. The model is tiny, so nothing is downloaded.

    python examples/huggingface_trainer.py

For a real model and tokenizer, load both by `from_pretrained`.
"""

import random
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, TrainingArguments

from pmlf.integrations.huggingface import PrivacyArguments, PrivateTrainer

WORDS = ["[PAD]", "[UNK]", "good", "great", "warm", "bad", "dull", "cold", "the", "film", "plot", "is", "and", "very"]


def reviews(number: int) -> Dataset:
    """Short reviews with labels: 1 is good."""
    labels = [random.randrange(2) for _ in range(number)]
    texts = [" ".join(random.choices(WORDS[2:5] if label else WORDS[5:8], k=3) + WORDS[8:11]) for label in labels]
    return Dataset.from_dict({"text": texts, "label": labels})


def main() -> None:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    train, test = (reviews(number).map(lambda batch: tokenizer(batch["text"]), batched=True) for number in (1500, 400))
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=2, initializer_range=0.1,
    )  # fmt: skip
    trainer = PrivateTrainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=50,
            gradient_accumulation_steps=5,
            num_train_epochs=4,
            learning_rate=0.01,
            eval_strategy="epoch",
            save_strategy="no",
            disable_tqdm=True,
        ),
        privacy=PrivacyArguments(target_epsilon=8.0, method="dpsgd"),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        compute_metrics=lambda made: {"accuracy": float((made.predictions.argmax(1) == made.label_ids).mean())},
    )
    trainer.train()
    print(f"test accuracy {trainer.evaluate()['eval_accuracy']:.2f}")
    print(f"epsilon {trainer.certificate()['epsilon']:.2f}")


if __name__ == "__main__":
    main()
