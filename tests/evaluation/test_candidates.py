"""Two-stage retrieval: candidates and their scores."""

import pytest
import torch
from torch.nn.functional import normalize

from tvr_lightning.evaluation.two_stage import nearest, score_candidates
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.methods.gare.model import GAREHead
from tvr_lightning.methods.gare.options import GapIncrement, GAREOptions

N, M, D = 9, 13, 16


def features(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sentence = torch.randn(N, D, generator=generator)
    video = VideoFeatures(torch.randn(M, 3, D, generator=generator), torch.ones(M, 3, dtype=torch.bool))
    return TextFeatures(sentence, torch.zeros(N, 0, D), torch.zeros(N, 0, dtype=torch.bool)), video


def gare():
    torch.manual_seed(1)
    head = GAREHead(D, 0, 3, GAREOptions(increment=GapIncrement(dropout=0.0))).eval()
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return torch.no_grad()(head.forward)


@pytest.mark.parametrize("block", [2, 1024])
@pytest.mark.parametrize("count", [1, 4, M, 100])
def test_nearest_are_those_of_the_largest_cosines(count, block):
    text, video = features()
    cosine = normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1), dim=-1).T
    found = nearest(text.sentence, video.frames.mean(1), count, queries_per_block=block)
    assert torch.equal(found, cosine.argsort(1, descending=True)[:, :count])


@pytest.mark.parametrize("videos_per_block", [1, 4, 100])
def test_candidates_have_the_scores_of_scoring_everything(videos_per_block):
    text, video = features()
    score = gare()
    candidates = nearest(text.sentence, video.frames.mean(1), 5)
    found = score_candidates(score, text, video, candidates, videos_per_block)
    torch.testing.assert_close(found, score(text, video).similarity.gather(1, candidates))
    candidates = nearest(video.frames.mean(1), text.sentence, 5)
    found = score_candidates(score, text, video, candidates, videos_per_block, "video-to-text")
    torch.testing.assert_close(found, score(text, video).similarity.T.gather(1, candidates))


def test_only_texts_with_a_candidate_among_the_videos_are_scored():
    text, video = features()
    seen = 0

    def score(some, few):
        nonlocal seen
        seen += len(some) * len(few)
        return Scores(some.sentence @ few.frames.mean(1).T)

    candidates = nearest(text.sentence, video.frames.mean(1), 3)
    score_candidates(score, text, video, candidates, videos_per_block=1)
    assert seen == N * 3


def test_all_candidates_re_ranked_are_the_full_ranking():
    text, video = features()
    score = gare()
    candidates = nearest(text.sentence, video.frames.mean(1), M)
    order = score_candidates(score, text, video, candidates).argsort(1, descending=True)
    assert torch.equal(candidates.gather(1, order), score(text, video).similarity.argsort(1, descending=True))
