"""CLIP4Clip's headers: scores against a plain restatement, options, gradients."""

import math

import pytest
import torch

from tvr_lightning.data.batch import TextBatch
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods.clip4clip import CLIP4Clip, CLIP4ClipOptions, TightTransf

KINDS = {"meanP": MeanP(), "seqLSTM": SeqLSTM(2), "seqTransf": SeqTransf(2), "tightTransf": TightTransf(2)}
HEADERS = list(KINDS)


def method(header="meanP", width=64, frames=5):
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=width, image_size=16, text_layers=2, vision_layers=1, context_length=12)
    kind = KINDS[header] if isinstance(header, str) else header
    return CLIP4Clip(encoder, words=9, frames=frames, clip4clip=CLIP4ClipOptions(similarity_header=kind))


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
    assert len(method(SeqTransf(1)).temporal.resblocks) == 1
    assert len(method(TightTransf(1)).cross.resblocks) == 1
    assert method("seqLSTM").temporal.lstm_visual.num_layers == 2
    assert method("tightTransf").cross.dropout.p == 0.1


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("meanP", r"similarity_header is meanP; it must be a SimilarityHeader"),
        (SeqTransf(0), r"SeqTransf\.blocks is 0; it must be at least 1"),
        (SeqLSTM(0), r"SeqLSTM\.layers is 0"),
        (TightTransf(1.5), r"TightTransf\.blocks is 1\.5; it must be a number"),
    ],
)
def test_options_that_do_not_fit_are_refused(header, message):
    with pytest.raises(ValueError, match=message):
        CLIP4ClipOptions(similarity_header=header)


class ScoresWords(CLIP4Clip):
    def score(self, text, video):
        assert text.words.shape[1] > 0, "a score of one's own sees the words"
        return super().score(text, video)


@pytest.mark.parametrize(("kind", "words"), [(CLIP4Clip, 0), (ScoresWords, 12)])
def test_an_evaluation_keeps_the_words_only_for_scores_that_may_use_them(kind, words):
    method = kind(TinyClipEncoder(64, 32, text_layers=1, vision_layers=1), words=12, frames=2).eval()
    with torch.no_grad():
        method.validation_step(TextBatch(["a dog", "a cat"], torch.arange(2)), 0)
    assert method.encoded.texts[0].features.words.shape == (2, words, 64)
