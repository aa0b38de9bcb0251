"""The best videos of every text, plain and post-processed; the bank's share of the training split."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tvr_lightning.data.loader import EvaluationSampler
from tvr_lightning.evaluation.loop import bank_loaders
from tvr_lightning.evaluation.normalization import Context, DualSoftmax, QueryBankNorm, normalize_scores
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.sources import AdjustedSource, MatrixSource, best_of_gallery
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures


def source(matrix, block=3):
    """Scores of a method that looks them up, in blocks."""
    rows, columns = matrix.shape
    texts = TextFeatures(torch.arange(rows)[:, None].float(), torch.zeros(rows, 1, 1), torch.ones(rows, 1).bool())
    videos = VideoFeatures(torch.arange(columns).float()[:, None, None], torch.ones(columns, 1).bool())

    def score(text, video):
        return Scores(matrix[text.sentence[:, 0].long()][:, video.frames[:, 0, 0].long()])

    sizes = {"block_texts": block, "block_videos": block}
    return PairScores(score, texts, videos, memory_budget_bytes=2**20, **sizes)


@pytest.fixture
def matrix():
    return torch.randn(7, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("k", [1, 3, 20])
def test_the_best_videos_are_those_of_the_whole_matrix(matrix, k):
    scores, columns = best_of_gallery(source(matrix), k)
    expected = matrix.topk(min(k, 8), dim=1)
    assert torch.equal(scores.float(), expected.values)
    assert torch.equal(columns, expected.indices)


@pytest.mark.parametrize("normalizer", [DualSoftmax(2.0), QueryBankNorm(2.0, k=2)], ids=lambda n: n.name)
def test_post_processing_reorders_them(matrix, normalizer):
    bank = matrix.flip(0)[:5] + 0.3
    plain = source(matrix)
    adjust = normalizer.fit(plain, Context(bank=MatrixSource(bank)))
    scores, columns = best_of_gallery(AdjustedSource(plain, adjust), 4)
    expected = normalize_scores(normalizer, matrix, bank).topk(4, dim=1)
    torch.testing.assert_close(scores.float(), expected.values)
    assert torch.equal(columns, expected.indices)
    assert not torch.equal(columns, best_of_gallery(plain, 4)[1])


def loader(items, replicas=1, rank=0):
    sampler = EvaluationSampler(items, replicas=replicas, rank=rank)
    return DataLoader(TensorDataset(torch.arange(items)), batch_size=2, sampler=sampler)


def items_of(loaders):
    return [torch.cat([batch[0] for batch in found]).tolist() for found in loaders]


def test_a_bank_is_drawn_over_the_whole_split_and_shared_by_processes():
    (drawn,) = items_of(bank_loaders([loader(40)], 7, 0))
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 7
    assert max(drawn) > 20 > min(drawn)
    shares = [items_of(bank_loaders([loader(40, 2, rank)], 7, 0))[0] for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == 4
    assert sorted(set(shares[0] + shares[1])) == drawn
    assert items_of(bank_loaders([loader(40)], 7, 1)) != [drawn]


def test_a_small_split_is_taken_whole():
    whole = loader(5)
    assert bank_loaders([whole], 5, 0) == [whole]
