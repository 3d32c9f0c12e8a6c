"""Encoders: the embedding of a record is its own, alone and in any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pmlf import data, priors
from pmlf.data.texts import Padding, TokenDataset
from pmlf.models.encoders import ImageEncoder, SentenceEncoder, embedded
from pmlf.priors.extraction import digest_of
from twins import sentences, write_glue, write_text_model, write_vision_model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> SentenceEncoder:
    return SentenceEncoder.load(str(write_text_model(tmp_path_factory.mktemp("model") / "bert", "bert")))


@pytest.fixture
def tokens(encoder: SentenceEncoder, tmp_path: Path) -> TokenDataset:
    write_glue(tmp_path, "sst2", records=30)
    return data.load_text("sst2", tmp_path).tokenised("train", encoder.tokenizer, longest=66, cut=False)


def test_an_embedding_pools_the_texts_own_tokens_layer_by_layer(encoder: SentenceEncoder) -> None:
    pooling = (("mean", -1), ("mean", -2), ("maximum", -1), ("first", -2), ("mean", -99))  # there is no such layer
    several = SentenceEncoder(encoder.inner, encoder.tokenizer, encoder.longest, pooling=pooling)
    texts = [text for text in sentences(6) if text]
    batch = encoder.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        found, usual = embedded(several, dict(batch)), embedded(encoder, dict(batch))
        for row, text in enumerate(texts):
            alone = encoder.tokenizer([text], return_tensors="pt")
            *_, before, last = (states[0] for states in encoder.inner(**alone, output_hidden_states=True).hidden_states)
            expected = [last.mean(0), before.mean(0), last.max(0).values, before[0]]
            torch.testing.assert_close(found[row], torch.cat(expected), atol=1e-5, rtol=0)
            torch.testing.assert_close(usual[row, : last.shape[1]], last.mean(0), atol=1e-5, rtol=0)
    assert several.pooling == pooling[:4]


def test_embeddings_of_a_dataset_are_those_of_its_records_alone(
    encoder: SentenceEncoder, tokens: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path / "cache"))
    padding = Padding(encoder.tokenizer.pad_token_id)
    contents = digest_of(tokens.arrays())
    found = priors.embed(encoder, tokens, padding, contents=contents, lengths=tokens.lengths)
    with torch.inference_mode():
        alone = np.concatenate([embedded(encoder, padding([tokens[place]])).numpy() for place in range(len(tokens))])
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-6)
    monkeypatch.setattr("pmlf.priors.extraction.embedded", lambda *_: torch.zeros(1, found.shape[1]))
    again = priors.embed(encoder, tokens, padding, contents=contents, lengths=tokens.lengths)
    assert np.array_equal(again, found)  # from the cache
    other = priors.embed(encoder, tokens, padding, contents="of other records", lengths=tokens.lengths)
    assert not other.any()


def test_an_image_encoder_takes_images_of_its_own_size(tmp_path: Path) -> None:
    encoder = ImageEncoder.load(str(write_vision_model(tmp_path / "vit", size=24)))
    assert encoder.images is not None and encoder.images.size == 24
    images = torch.randn(3, 3, 24, 24)
    with torch.inference_mode():
        together, alone = encoder(images), encoder(images[1:2])
    assert together.shape[0] == 3
    torch.testing.assert_close(together[1], alone[0], atol=1e-5, rtol=0)


def test_a_folder_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as an encoder of texts"):
        SentenceEncoder.load(str(tmp_path))
