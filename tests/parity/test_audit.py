"""The audit passes honest scores and catches planted leaks, stating the effect on R@1."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.parity.audit import audit_encoding, audit_scores

TEXTS, VIDEOS, DIMENSION = 24, 12, 16
VIDEO_OF_TEXT = torch.arange(TEXTS) % VIDEOS


def features(seed: int = 0) -> tuple[TextFeatures, VideoFeatures]:
    """Two captions per video, only loosely related to it."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(VIDEOS, 3, DIMENSION, generator=generator)
    words = torch.randn(TEXTS, 4, DIMENSION, generator=generator)
    words[:, 0] += 0.3 * frames.mean(1)[VIDEO_OF_TEXT]
    text = TextFeatures(words[:, 0], words, torch.ones(TEXTS, 4, dtype=torch.bool))
    return text, VideoFeatures(frames, torch.ones(VIDEOS, 3, dtype=torch.bool))


def cosines(text: TextFeatures, video: VideoFeatures) -> Tensor:
    return normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1), dim=-1).T


def honest(text: TextFeatures, video: VideoFeatures) -> Scores:
    return Scores(cosines(text, video))


def batch_statistics(text: TextFeatures, video: VideoFeatures) -> Scores:
    similarity = cosines(text, video)
    return Scores(similarity - similarity.mean(0, keepdim=True))


def caption_order(text: TextFeatures, video: VideoFeatures) -> Scores:
    return Scores(cosines(text, video) + 0.1 * torch.arange(len(text)).unsqueeze(1).remainder(2))


def lookup_by_pair(text: TextFeatures, video: VideoFeatures) -> Scores:
    """What a code with one caption per video in the videos' order could look up: that places agree."""
    similarity = cosines(text, video)
    places = torch.arange(len(text)).unsqueeze(1) // (len(text) // len(video) or 1)
    return Scores(similarity + 2.0 * (places == torch.arange(len(video))))


def own_caption(text: TextFeatures, video: VideoFeatures, own: TextFeatures) -> Scores:
    return Scores(normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1) + own.sentence, dim=-1).T)


def test_an_honest_score_passes():
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score=honest)
    assert not audit.leaks
    assert audit.recall_as_evaluated == pytest.approx(audit.recall_without_help)
    assert (audit.texts, audit.videos) == (TEXTS, VIDEOS)


@pytest.mark.parametrize("leak", [batch_statistics, caption_order, lookup_by_pair])
def test_planted_leaks_are_caught(leak):
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score=leak)
    assert audit.leaks
    assert max(finding.change for finding in audit.findings) > 0.01


def test_the_effect_of_a_lookup_on_recall_is_stated():
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score=lookup_by_pair)
    assert audit.recall_as_evaluated == 100.0
    assert audit.recall_without_help < 60.0


def test_a_protocol_that_hands_videos_their_own_captions_is_caught_with_its_effect():
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score_as_released=own_caption)
    assert [finding.experiment for finding in audit.findings if finding.leaks] == [
        "other captions handed to the videos"
    ]
    assert audit.recall_as_evaluated > audit.recall_without_help + 20


def test_batch_statistics_in_an_encoder_are_caught():
    text, _ = features()

    def honest_encoding(rows: Tensor) -> TextFeatures:
        return text[rows]

    def normalised_over_the_batch(rows: Tensor) -> TextFeatures:
        some = text[rows]
        return TextFeatures(some.sentence - some.sentence.mean(0), some.words, some.word_mask)

    assert not any(finding.leaks for finding in audit_encoding(honest_encoding, TEXTS))
    assert any(finding.leaks for finding in audit_encoding(normalised_over_the_batch, TEXTS))


def test_what_cannot_be_audited_is_refused():
    text, video = features()
    with pytest.raises(ValueError, match="either"):
        audit_scores(text, video, VIDEO_OF_TEXT)
    with pytest.raises(ValueError, match="at least 4"):
        audit_scores(text[:2], video[:2], VIDEO_OF_TEXT[:2], score=honest)
    with pytest.raises(ValueError, match="a text for every video"):
        audit_scores(text, video, torch.zeros(TEXTS, dtype=torch.int64), score=honest)
