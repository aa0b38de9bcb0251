"""X-CLIP's contrasts and masks."""

import pytest
import torch
from methods.parts import DOUBLE, features, moved

from tvr_lightning.layers.aggregation import MeanAggregation, SoftmaxAggregation
from tvr_lightning.layers.temporal import MeanP
from tvr_lightning.methods.xclip import AOSM, XCLIPHead, XCLIPOptions

W, F, D = 6, 4, 16
CONTRASTS = ("video_sentence", "video_word", "sentence_frame", "frame_word")


def head(**options):
    torch.manual_seed(1)
    return moved(XCLIPHead(D, W, F, XCLIPOptions(**{"similarity_header": MeanP(), **options})).double())


@pytest.mark.parametrize("contrasts", [CONTRASTS, *[(name,) for name in CONTRASTS], ("frame_word", "video_word")])
def test_contrasts_are_averaged_and_have_no_unused_parameters(contrasts):
    made = head(contrasts=contrasts)
    scores = made(*features(width=D, **DOUBLE))
    assert set(scores.parts) == set(contrasts)
    torch.testing.assert_close(scores.similarity, torch.stack([scores.parts[n] for n in contrasts]).mean(0))
    scores.similarity.square().sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


@pytest.mark.parametrize("aggregation", [AOSM, SoftmaxAggregation, MeanAggregation])
def test_a_video_without_frames_and_a_text_without_words_score_zero(aggregation):
    text, video = features(2, 2, width=D, **DOUBLE)
    text.word_mask[0] = False
    video.frame_mask[1] = False
    made = head(similarity_aggregation=aggregation(), mask_words=True, mask_frames=True)
    scores = made(text, video)
    assert not scores.parts["video_word"][0].any()
    assert not scores.parts["sentence_frame"][:, 1].any()
    assert (scores.parts["frame_word"] != 0).tolist() == [[False, False], [True, False]]
    scores.similarity.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())
