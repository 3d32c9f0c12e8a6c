"""Models of `transformers` and `peft` as people fine-tune them, made tiny and offline from their configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from pmlf import fix_model

SAMPLES = 4
TOKENS = 7
WORDS = 40
CLASSES = 3
Built = tuple[nn.Module, Callable[[Any, Any], Tensor], dict[str, Tensor]]
Made = Callable[[], Built]
Extra = Callable[[], Mapping[str, Tensor]]

_WIDTH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
_TEXT = {"vocab_size": WORDS, "max_position_embeddings": 24, **_WIDTH}
_LLAMA = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
_IMAGE = {"image_size": 16, "patch_size": 8, "num_channels": 3, **_WIDTH}
_SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 24,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2, "pad_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip
_SPEECH = {
    **_WIDTH, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12, "classifier_proj_size": 8,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
}  # fmt: skip


def words(tokens: int = TOKENS) -> dict[str, Tensor]:
    """Sequences of different lengths: index 0 pads."""
    ids = torch.randint(3, WORDS, (SAMPLES, tokens))
    mask = (torch.arange(tokens) < torch.randint(3, tokens + 1, (SAMPLES, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def whole_sentences(tokens: int = TOKENS) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (SAMPLES, tokens))}


def pixels(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(SAMPLES, 3, size, size)}


def classify(model: Any, batch: Any) -> Tensor:
    given = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**given).logits, batch["labels"], reduction="none")


def classify_tokens(model: Any, batch: Any) -> Tensor:
    given = {name: value for name, value in batch.items() if name != "labels"}
    losses = F.cross_entropy(model(**given).logits.mT, batch["labels"], reduction="none")
    mask = batch.get("attention_mask", torch.ones_like(losses))
    return (losses * mask).sum(1) / mask.sum(1)


def next_words(model: Any, batch: Any) -> Tensor:
    logits = model(**batch, use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none")
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, 1:]
    return (losses * mask).sum(1) / mask.sum(1)


def translate(model: Any, batch: Any) -> Tensor:
    given = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**given, decoder_input_ids=batch["labels"][:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.mT, batch["labels"][:, 1:], reduction="none").mean(1)


def segment(model: Any, batch: Any) -> Tensor:
    logits = model(batch["pixel_values"]).logits
    labels = batch["labels"][:, : logits.shape[2], : logits.shape[3]]
    return F.cross_entropy(logits, labels, reduction="none").mean((1, 2))


def image_and_text(model: Any, batch: Any) -> Tensor:
    """How far an image is from its own text."""
    out = model(**batch)
    alike = F.cosine_similarity(out.image_embeds, out.text_embeds)
    return F.softplus(-model.logit_scale.exp() * alike)


def without_chance(config: Any) -> Any:
    """Dropout of every name off."""
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or name in ("attention_probs_dropout_prob",)):
            setattr(config, name, 0.0)
    return config


def head(
    stem: str, task: str, loss: Callable[[Any, Any], Tensor], batch: Callable[[], Mapping[str, Tensor]],
    *, config: str | None = None, labels: Callable[[], Tensor] | None = None, **options: Any,
) -> Made:  # fmt: skip
    def make() -> Built:
        settings = without_chance(getattr(hf, f"{config or stem}Config")(**options))
        model = getattr(hf, f"{stem}For{task}")(settings)
        return model, loss, {**batch(), **({} if labels is None else {"labels": labels()})}

    return make


def one_label() -> Tensor:
    return torch.randint(CLASSES, (SAMPLES,))


def text_classes(stem: str, batch: Any = words, **options: Any) -> Made:
    options = {"num_labels": CLASSES, **_TEXT, **options}
    return head(stem, "SequenceClassification", classify, batch, labels=one_label, **options)


def own_sizes(stem: str, batch: Any = words, **options: Any) -> Made:
    """A classifier whose configuration has its own names for sizes."""
    options = {"num_labels": CLASSES, "vocab_size": WORDS, **options}
    return head(stem, "SequenceClassification", classify, batch, labels=one_label, **options)


def token_classes(stem: str, batch: Any = words, **options: Any) -> Made:
    def labels() -> Tensor:
        return torch.randint(CLASSES, (SAMPLES, TOKENS))

    return head(stem, "TokenClassification", classify_tokens, batch, labels=labels, num_labels=CLASSES, **options)


def masked_words(stem: str, **options: Any) -> Made:
    def labels() -> Tensor:
        return torch.randint(3, WORDS, (SAMPLES, TOKENS))

    return head(stem, "MaskedLM", classify_tokens, words, labels=labels, **{**_TEXT, **options})


def causal(stem: str, batch: Any = words, config: str | None = None, **options: Any) -> Made:
    return head(stem, "CausalLM", next_words, batch, config=config, **options)


def seq2seq(stem: str, batch: Any = words, **options: Any) -> Made:
    def labels() -> Tensor:
        return torch.randint(3, WORDS, (SAMPLES, 6))

    return head(stem, "ConditionalGeneration", translate, batch, labels=labels, **options)


def image_classes(stem: str, size: int = 16, **options: Any) -> Made:
    options = {"num_labels": CLASSES, **options}
    return head(stem, "ImageClassification", classify, lambda: pixels(size), labels=one_label, **options)


def sound(stem: str, **options: Any) -> Made:
    def batch() -> dict[str, Tensor]:
        return {"input_values": torch.randn(SAMPLES, 200)}

    options = {"num_labels": CLASSES, **_SPEECH, **options}
    return head(stem, "SequenceClassification", classify, batch, labels=one_label, **options)


def gpt2() -> Built:
    config = hf.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=24, bos_token_id=0, eos_token_id=0
    )
    return hf.GPT2LMHeadModel(without_chance(config)), next_words, words()


def clip() -> Built:
    config = hf.CLIPConfig(
        text_config=without_chance(hf.CLIPTextConfig(**_TEXT, eos_token_id=2, projection_dim=8)),
        vision_config=without_chance(hf.CLIPVisionConfig(**_IMAGE, projection_dim=8)),
        projection_dim=8,
    )
    return hf.CLIPModel(config), image_and_text, {**words(), **pixels()}


def whisper() -> Built:
    config = hf.WhisperConfig(
        **{name: value for name, value in _SEQ2SEQ.items() if name != "max_position_embeddings"},
        num_mel_bins=6, max_source_positions=10, max_target_positions=12, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    batch = {"input_features": torch.randn(SAMPLES, 6, 20), "labels": torch.randint(3, WORDS, (SAMPLES, 6))}
    return hf.WhisperForConditionalGeneration(without_chance(config)), translate, batch


def fixed(make: Made) -> Made:
    """The same model with layers that can be private."""

    def made() -> Built:
        model, loss, batch = make()
        return fix_model(model), loss, batch

    return made


def with_lora(make: Made, targets: list[str], **options: Any) -> Made:
    def made() -> Built:
        model, loss, batch = make()
        adapters = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, **options)
        return get_peft_model(model, adapters), loss, batch

    return made


llama = causal("Llama", **_LLAMA)
bert = text_classes("Bert")
TRANSFORMERS: dict[str, Made] = {
    "BERT classes": bert,
    "BERT tokens": token_classes("Bert", **_TEXT),
    "BERT masked words": masked_words("Bert"),
    "RoBERTa classes": text_classes("Roberta", pad_token_id=0),
    "RoBERTa masked words": masked_words("Roberta", pad_token_id=0),
    "XLM-RoBERTa tokens": token_classes("XLMRoberta", **_TEXT, pad_token_id=0),
    "CamemBERT classes": text_classes("Camembert", pad_token_id=0),
    "DistilBERT classes": text_classes("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=20),
    "ALBERT classes": text_classes("Albert", embedding_size=8),
    "ALBERT masked words": masked_words("Albert", embedding_size=8),
    "ELECTRA classes": text_classes("Electra", embedding_size=8),
    "MPNet classes": text_classes("MPNet", pad_token_id=0),
    "DeBERTa classes": text_classes(
        "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8
    ),
    "DeBERTa-v2 classes": text_classes(
        "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4, share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    "ModernBERT classes": text_classes(
        "ModernBert", global_attn_every_n_layers=2, local_attention=4, pad_token_id=0, cls_token_id=1, sep_token_id=2
    ),
    "Nystromformer classes": text_classes("Nystromformer", num_landmarks=7, segment_means_seq_len=7),
    "FNet classes": text_classes("FNet", whole_sentences),
    "ConvBERT classes": text_classes("ConvBert", embedding_size=8, head_ratio=1, conv_kernel_size=3),
    "SqueezeBERT classes": text_classes("SqueezeBert", embedding_size=16, q_groups=2, k_groups=2, v_groups=2),
    "Longformer classes": text_classes(
        "Longformer", lambda: words(8), attention_window=[4, 4], pad_token_id=0, max_position_embeddings=30
    ),
    "Funnel classes": own_sizes(
        "Funnel", lambda: words(8), d_model=16, d_head=8, d_inner=20, n_head=2, block_sizes=[1, 1], num_decoder_layers=1
    ),
    "XLNet classes": own_sizes("XLNet", d_model=16, n_layer=2, n_head=2, d_inner=20),
    "XLM classes": own_sizes("XLM", n_words=WORDS, emb_dim=16, n_layers=2, n_heads=2, pad_index=0),
    "Roformer classes": text_classes("RoFormer", embedding_size=16),
    "GPT-2": gpt2,
    "GPT-Neo": causal(
        "GPTNeo", vocab_size=WORDS, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=20,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=24,
    ),
    "GPT-NeoX": causal("GPTNeoX", **_TEXT),
    "GPT-J": causal("GPTJ", vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=24, rotary_dim=4),
    "CodeGen": causal("CodeGen", vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=24, rotary_dim=2),
    "OPT": causal("OPT", **_TEXT, ffn_dim=20, word_embed_proj_dim=16, pad_token_id=0),
    "Bloom": causal("Bloom", vocab_size=WORDS, hidden_size=16, n_layer=2, n_head=2),
    "MPT": causal("Mpt", vocab_size=WORDS, d_model=16, n_layers=2, n_heads=2, max_seq_len=24, expansion_ratio=2),
    "Llama": llama,
    "Llama classes": text_classes("Llama", **_LLAMA),
    "Mistral": causal("Mistral", **_LLAMA, sliding_window=5),
    "Mixtral": causal("Mixtral", **_LLAMA, num_local_experts=3),
    "Qwen2": causal("Qwen2", **_LLAMA),
    "Qwen3": causal("Qwen3", **_LLAMA),
    "Gemma": causal("Gemma", **_LLAMA),
    "Gemma 2": causal("Gemma2", **_LLAMA, sliding_window=5),
    "Gemma 3": causal("Gemma3", config="Gemma3Text", **_LLAMA, sliding_window=5),
    "Phi": causal("Phi", **_TEXT, pad_token_id=0),
    "Phi-3": causal("Phi3", **{**_TEXT, "num_key_value_heads": 1, "pad_token_id": 0}),
    "Falcon": causal("Falcon", vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2),
    "StableLM": causal("StableLm", **{**_TEXT, "num_key_value_heads": 1}),
    "OLMo 2": causal("Olmo2", **_LLAMA),
    "Cohere": causal("Cohere", **_LLAMA),
    "Mamba": causal("Mamba", whole_sentences, vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=4),
    "RWKV": head(
        "Rwkv", "CausalLM", next_words, whole_sentences, vocab_size=WORDS, hidden_size=16, attention_hidden_size=16,
        num_hidden_layers=2, intermediate_size=20, context_length=24, rescale_every=0,
    ),
    "T5": seq2seq("T5", **_T5),
    "mT5": seq2seq("MT5", **_T5),
    "BART": seq2seq("Bart", **_SEQ2SEQ),
    "mBART": seq2seq("MBart", **_SEQ2SEQ),
    "Pegasus": seq2seq("Pegasus", **_SEQ2SEQ),
    "M2M-100": seq2seq("M2M100", **_SEQ2SEQ),
    "Whisper": whisper,
    "ViT": image_classes("ViT", **_IMAGE),
    "DeiT": image_classes("DeiT", **_IMAGE),
    "BEiT": image_classes("Beit", **_IMAGE, use_relative_position_bias=True),
    "DINOv2": image_classes("Dinov2", **_IMAGE, mlp_ratio=2),
    "Swin": image_classes(
        "Swin", image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4
    ),
    "Swin v2": image_classes(
        "Swinv2", image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4
    ),
    "ConvNeXt": image_classes("ConvNext", depths=[1, 1], hidden_sizes=[8, 16], num_stages=2),
    "ConvNeXt v2": image_classes("ConvNextV2", depths=[1, 1], hidden_sizes=[8, 16], num_stages=2),
    "PoolFormer": image_classes(
        "PoolFormer", 32, depths=[1, 1], hidden_sizes=[8, 16], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2],
        padding=[2, 1],
    ),
    "SegFormer classes": image_classes(
        "Segformer", 32, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    ),
    "SegFormer fixed, pixels": fixed(
        head(
            "Segformer", "SemanticSegmentation", segment, lambda: pixels(32), num_labels=CLASSES, num_encoder_blocks=2,
            labels=lambda: torch.randint(CLASSES, (SAMPLES, 8, 8)), depths=[1, 1], sr_ratios=[2, 1],
            hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
            decoder_hidden_size=8,
        )
    ),
    "ResNet fixed": fixed(
        image_classes("ResNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ),
    "MobileViT fixed": fixed(
        image_classes(
            "MobileViT", 32, image_size=32, patch_size=1, hidden_sizes=[8, 8, 8], mlp_ratio=1.5, num_attention_heads=2,
            neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16],
        )
    ),
    "CLIP": clip,
    "CLIP images": head(
        "CLIP", "ImageClassification", classify, pixels, labels=one_label, num_labels=CLASSES,
        vision_config=hf.CLIPVisionConfig(**_IMAGE),
    ),
    "wav2vec 2.0": sound("Wav2Vec2"),
    "HuBERT": sound("Hubert"),
    "BERT with LoRA": with_lora(bert, ["query", "value"], task_type="SEQ_CLS"),
    "Llama with LoRA": with_lora(llama, ["q_proj", "v_proj"]),
    "GPT-2 with LoRA": with_lora(gpt2, ["c_attn"], fan_in_fan_out=True),
    "T5 with LoRA": with_lora(seq2seq("T5", **_T5), ["q", "v"]),
    "Llama with DoRA": with_lora(llama, ["q_proj", "down_proj"], use_dora=True),
}  # fmt: skip
