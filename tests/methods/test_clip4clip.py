"""CLIP4Clip's headers: scores against a plain restatement, the tight header's cross encoder, and what is kept."""

import math

import pytest
import torch
from methods.parts import build, features, paired

from tvr_lightning.data.batch import TextBatch
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.clip4clip import CrossEncoder, TightTransf, cross_encoder


def method(header):
    return build(CLIP4Clip, {"similarity_header": header}, torch.float32)


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def mean_of_unit_frames(frames, mask):
    """Loops over the definition, on lists."""
    real = [frame for frame, there in zip(frames, mask, strict=True) if there]
    unit = [[x / math.sqrt(sum(y * y for y in frame)) for x in frame] for frame in real]
    return [sum(column) / len(unit) for column in zip(*unit, strict=True)]


def test_mean_pooling_is_the_paper_in_loops():
    text, video = features()
    similarity = method(MeanP()).score(text, video).similarity
    for i, sentence in enumerate(text.sentence.double().tolist()):
        for j, frames in enumerate(video.frames.double().tolist()):
            pooled = mean_of_unit_frames(frames, video.frame_mask[j].tolist())
            assert similarity[i, j].item() == pytest.approx(cosine(sentence, pooled), abs=1e-6)


def test_the_tight_header_takes_no_temperature():
    model = method(TightTransf(2)).eval()
    assert not model.temperature.logit_scale.requires_grad
    pairs = paired(*features(3, 3))
    similarity, loss = model.score(pairs.text, pairs.video).similarity, model.losses(pairs)["info_nce"]
    assert torch.equal(model.logits(similarity), similarity)
    model.temperature.logit_scale.data.fill_(1.0)
    assert torch.equal(model.losses(pairs)["info_nce"], loss)
    cosines = method(MeanP())
    assert cosines.temperature.logit_scale.requires_grad
    assert torch.equal(cosines.logits(similarity), cosines.temperature() * similarity)


def test_headers_have_the_layers_of_their_options():
    text, video = features()
    pooled, lstm, transformer = (method(header) for header in (MeanP(), SeqLSTM(2), SeqTransf(1)))
    expected = pooled.score(text, pooled.encode_video(video)).similarity
    for model in (lstm, transformer):
        assert not torch.allclose(model.score(text, model.encode_video(video)).similarity, expected, atol=1e-4)
    assert lstm.temporal.lstm_visual.num_layers == 2
    assert len(transformer.temporal.resblocks) == 1
    cross = method(TightTransf(1)).cross
    assert len(cross.resblocks) == 1
    assert cross.dropout.p == 0.1


class ScoresWords(CLIP4Clip):
    def score(self, text, video):
        assert text.words.shape[1] > 0, "a method with its own score sees the words"
        return super().score(text, video)


@pytest.mark.parametrize(("kind", "words"), [(CLIP4Clip, 0), (ScoresWords, 12)])
def test_an_evaluation_keeps_the_words_only_for_scores_that_may_use_them(kind, words):
    method = kind(TinyClipEncoder(64, 32, text_layers=1, vision_layers=1), words=12, frames=2).eval()
    with torch.no_grad():
        method.validation_step(TextBatch(["a dog", "a cat"], torch.arange(2)), 0)
    assert method.encoded.texts[0].features.words.shape == (2, words, 64)


def cross_with(dropout):
    cross = CrossEncoder(64, layers=1, positions=9, dropout=dropout)
    torch.manual_seed(1)
    for parameter in cross.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # logits differ clearly between pairs
    return cross


def test_padded_frames_do_not_reach_the_cross_encoder():
    cross, (text, video) = cross_with(0.1).eval(), features()
    scores = cross(text, video).similarity
    assert scores.std() > 1e-3
    noise = torch.where(video.frame_mask.unsqueeze(-1), video.frames, torch.randn_like(video.frames))
    torch.testing.assert_close(cross(text, VideoFeatures(noise, video.frame_mask)).similarity, scores)


@pytest.mark.parametrize(("dropout", "training"), [(0.5, True), (0.5, False), (0.0, True)])
def test_dropout_acts_in_training_only(dropout, training):
    cross, (text, video) = cross_with(dropout).train(training), features()
    assert torch.equal(cross(text, video).similarity, cross(text, video).similarity) is (dropout == 0 or not training)


def test_the_cross_encoder_starts_from_the_text_transformer():
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=3, vision_layers=1, context_length=10)
    cross = cross_encoder(encoder, layers=2, frames=12)
    assert cross.position_embeddings.num_embeddings == 13
    assert torch.equal(cross.position_embeddings.weight[:10], encoder.clip.positional_embedding)
    for mine, theirs in zip(cross.resblocks, encoder.clip.transformer.resblocks, strict=False):
        assert torch.equal(mine.attn.in_proj_weight, theirs.attn.in_proj_weight)
        assert torch.equal(mine.mlp.c_proj.bias, theirs.mlp.c_proj.bias)
