"""Cases that people fine-tune and train: language models, a translator, ConvNeXt, an LSTM, a U-Net, low-rank adapters.

A function for each, so that tests run the same model with small sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pmlf.bench.case import Case

_WORDS = 8000


class _Words(nn.Module):
    """A Hugging Face language model that returns its logits as a tensor, classes on axis 1."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits.mT


class _Translation(nn.Module):
    """An encoder and decoder on one tensor: the source first, then what the decoder is given."""

    def __init__(self, model: nn.Module, source: int) -> None:
        super().__init__()
        self.model, self.source = model, source

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = tokens[:, : self.source], tokens[:, self.source :]
        logits: Tensor = self.model(input_ids=source, decoder_input_ids=target, use_cache=False).logits
        return logits.mT


class _Images(nn.Module):
    """A Hugging Face image classifier that returns its logits as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


class _LSTM(nn.Module):
    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(tokens))[0].mean(1))
        return logits


def _pair(inside: int, outside: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers += [nn.Conv2d(channels, outside, 3, padding=1), nn.GroupNorm(min(8, outside), outside), nn.ReLU()]
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    """Three times down by pooling and up by transposed convolutions, with the features of the way down beside them."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([3, *widths[:-2]], widths[:-1], strict=True))
        self.bottom = _pair(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.across = nn.ModuleList(_pair(2 * w, w) for w in reversed(widths[:-1]))
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = []
        for block in self.down:
            passed.append(block(x))
            x = self.pool(passed[-1])
        x = self.bottom(x)
        for up, block in zip(self.up, self.across, strict=True):
            x = block(torch.cat([passed.pop(), up(x)], 1))
        logits: Tensor = self.head(x)
        return logits


def _llama_model(layers: int, width: int, words: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def llama(*, layers: int = 8, width: int = 512, length: int = 128, words: int = _WORDS, batch: int = 8) -> Case:
    """A language model of Llama's kind with all weights trained."""
    return Case(
        name="llama",
        batch=batch,
        classes=words,
        build=lambda: _Words(_llama_model(layers, width, words)),
        inputs=lambda samples: torch.randint(words, (samples, length)),
        label_shape=(length,),
        imports=("transformers.models.llama.modeling_llama",),
    )


def llama_lora(
    *, layers: int = 8, width: int = 512, length: int = 128, words: int = _WORDS, batch: int = 8, rank: int = 8
) -> Case:
    """The same with its weights frozen, and adapters of low rank on all projections of attention."""

    def build() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=rank, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        return _Words(get_peft_model(_llama_model(layers, width, words), adapters))

    return Case(
        name="llama-lora",
        batch=batch,
        classes=words,
        build=build,
        inputs=lambda samples: torch.randint(words, (samples, length)),
        label_shape=(length,),
        imports=("transformers.models.llama.modeling_llama", "peft"),
    )


def t5(
    *, layers: int = 6, width: int = 512, source: int = 64, target: int = 32, words: int = _WORDS, batch: int = 8
) -> Case:
    """An encoder and decoder of T5-small's size, but for its vocabulary."""

    def build() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=words, d_model=width, d_kv=width // 8, d_ff=4 * width, num_layers=layers, num_heads=8,
            dropout_rate=0.0,
        )  # fmt: skip
        return _Translation(T5ForConditionalGeneration(config), source)

    return Case(
        name="t5",
        batch=batch,
        classes=words,
        build=build,
        inputs=lambda samples: torch.randint(2, words, (samples, source + target)),
        label_shape=(target,),
        imports=("transformers.models.t5.modeling_t5",),
    )


def convnext(
    *, depths: tuple[int, ...] = (3, 3, 9, 3), width: int = 96, size: int = 64, classes: int = 10, batch: int = 16
) -> Case:
    """ConvNeXt-tiny on small images."""

    def build() -> nn.Module:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        widths = [width * 2**stage for stage in range(len(depths))]
        config = ConvNextConfig(depths=list(depths), hidden_sizes=widths, num_stages=len(depths), drop_path_rate=0.0)
        config.num_labels = classes
        return _Images(ConvNextForImageClassification(config))

    return Case(
        name="convnext",
        batch=batch,
        classes=classes,
        build=build,
        inputs=lambda samples: torch.randn(samples, 3, size, size),
        images=True,
        imports=("transformers.models.convnext.modeling_convnext",),
    )


def lstm(*, layers: int = 2, width: int = 256, length: int = 64, words: int = _WORDS, batch: int = 32) -> Case:
    """A classifier of texts by an LSTM."""
    return Case(
        name="lstm",
        batch=batch,
        classes=2,
        build=lambda: _LSTM(words, width, layers),
        inputs=lambda samples: torch.randint(words, (samples, length)),
    )


def unet(*, width: int = 32, size: int = 64, classes: int = 4, batch: int = 8) -> Case:
    """A U-Net that names the class of every pixel."""
    return Case(
        name="unet",
        batch=batch,
        classes=classes,
        build=lambda: _UNet(width, classes),
        inputs=lambda samples: torch.randn(samples, 3, size, size),
        label_shape=(size, size),
        images=True,
    )
