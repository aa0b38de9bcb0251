"""CLIP4Clip's headers: scores against a plain restatement, options, gradients."""

import math

import pytest
import torch

from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods.clip4clip import CLIP4Clip

HEADERS = ["meanP", "seqLSTM", "seqTransf", "tightTransf"]


def method(header="meanP", width=64, frames=5, **options):
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=width, image_size=16, text_layers=2, vision_layers=1, context_length=12)
    layers = {} if header == "meanP" else {"temporal_layers": 2}
    return CLIP4Clip(encoder, words=9, frames=frames, similarity_header=header, **(layers | options))


def features(texts=4, videos=3, width=64, frames=5):
    generator = torch.Generator().manual_seed(1)
    sentence = torch.randn(texts, width, generator=generator)
    words = torch.randn(texts, 9, width, generator=generator)
    lengths = torch.arange(videos) % frames + 1
    mask = torch.arange(frames) < lengths[:, None]
    text = TextFeatures(sentence, words, torch.ones(texts, 9, dtype=torch.bool))
    return text, VideoFeatures(torch.randn(videos, frames, width, generator=generator), mask)


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
    similarity = method().score(text, video).similarity
    for i, sentence in enumerate(text.sentence.double().tolist()):
        for j, frames in enumerate(video.frames.double().tolist()):
            pooled = mean_of_unit_frames(frames, video.frame_mask[j].tolist())
            assert similarity[i, j].item() == pytest.approx(cosine(sentence, pooled), abs=1e-6)


@pytest.mark.parametrize("header", HEADERS)
def test_a_permutation_of_items_permutes_the_scores(header):
    model = method(header).eval()
    text, video = features()
    similarity = model.score(text, model.encode_video(video)).similarity
    texts, videos = [2, 0, 3, 1], [1, 2, 0]
    shuffled = model.score(text[texts], model.encode_video(video[videos])).similarity
    torch.testing.assert_close(shuffled, similarity[texts][:, videos])


@pytest.mark.parametrize("header", HEADERS)
def test_every_trainable_part_gets_a_gradient(header):
    model = method(header)
    text, video = features(texts=3)
    index = torch.arange(3)
    loss = model.losses(PairedFeatures(text, model.encode_video(video), index, index))
    assert list(loss) == ["info_nce"]
    loss["info_nce"].backward()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and not name.startswith("encoder.")}
    without = {name for name in trainable if model.get_parameter(name).grad is None}
    assert not without
    assert ("temperature.logit_scale" in trainable) == (header != "tightTransf")


def test_the_tight_header_takes_no_temperature():
    model = method("tightTransf").eval()
    text, video = features(texts=3)
    index = torch.arange(3)
    pairs = PairedFeatures(text, video, index, index)
    similarity, loss = model.score(text, video).similarity, model.losses(pairs)["info_nce"]
    assert torch.equal(model.logits(similarity), similarity)
    model.temperature.logit_scale.data.fill_(1.0)
    assert torch.equal(model.losses(pairs)["info_nce"], loss)
    cosines = method("meanP")
    expected = cosines.temperature() * similarity
    assert torch.equal(cosines.logits(similarity), expected)


def test_headers_differ_where_their_layers_say_so():
    text, video = features()
    scores = []
    for header in HEADERS[:3]:
        model = method(header)
        scores.append(model.score(text, model.encode_video(video)).similarity)
    assert not torch.allclose(scores[0], scores[1], atol=1e-4)
    assert not torch.allclose(scores[0], scores[2], atol=1e-4)
    assert len(method("seqTransf", temporal_layers=1).temporal.resblocks) == 1
    assert len(method("tightTransf", temporal_layers=1).cross.resblocks) == 1
    assert method("seqLSTM").temporal.lstm_visual.num_layers == 2
    assert method("tightTransf").cross.dropout.p == 0.1
    assert method("tightTransf", cross_dropout=0.3).cross.dropout.p == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"similarity_header": "mean"}, "expected one of meanP, seqLSTM, seqTransf, tightTransf"),
        ({"similarity_header": "meanP", "temporal_layers": 2}, "meanP has no temporal layers"),
        ({"similarity_header": "seqTransf", "temporal_layers": 0}, "temporal_layers is 0"),
        ({"similarity_header": "seqTransf", "cross_dropout": 0.1}, "cross_dropout belongs to .* tightTransf"),
        ({"similarity_header": "tightTransf", "temporal_layers": 1, "cross_dropout": 1.5}, "dropout is 1.5"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    encoder = TinyClipEncoder(width=64, image_size=16, text_layers=1, vision_layers=1)
    with pytest.raises(ValueError, match=message):
        CLIP4Clip(encoder, **options)
