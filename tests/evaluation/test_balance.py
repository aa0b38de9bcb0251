"""Summed retrieval probabilities, the normalization error, and false negatives and positives: NCL, section 3.2."""

import numpy as np
import pytest
import torch
from metric_rows import in_blocks, text_features, video_features
from torch.nn.functional import normalize

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.balance import balance, error_rates
from tvr_lightning.evaluation.evaluator import Evaluator
from tvr_lightning.evaluation.normalization import Bank, SinkhornBias
from tvr_lightning.evaluation.results import captions, results_of
from tvr_lightning.features import Scores

GAMMA = 0.05


def hubs(count=60, seed=0):
    """Unit texts and videos of matching pairs, some of which are hubs: they lie along a direction that all share."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.zeros(16)
    common[0] = 1.0
    content = torch.randn(count, 16, generator=generator)
    texts = content + torch.randn(count, 16, generator=generator)
    texts += 6 * (0.5 + torch.rand(count, 1, generator=generator)) * common
    videos = content + 8 * torch.rand(count, 1, generator=generator) * common
    return normalize(texts, dim=-1), normalize(videos, dim=-1)


def test_the_share_of_an_item_follows_from_its_matching_queries():
    """Both directions of videos with one to three captions, in NumPy."""
    owner = torch.tensor([0, 0, 0, 1, 2, 2])
    scores = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for matrix, queries, items in ((scores, owner, torch.arange(3)), (scores.T, torch.arange(3), owner)):
        matches = (queries[:, None] == items).double().numpy()
        share = (matches / matches.sum(1, keepdims=True)).sum(0)
        odds = np.exp(matrix.numpy() / GAMMA - matrix.numpy().max() / GAMMA)
        mass = (odds / odds.sum(1, keepdims=True)).sum(0)
        found = balance(in_blocks(matrix, 2, 2), GAMMA, queries, items)
        assert found.error == pytest.approx(np.abs(share - mass).mean())
        edges, counts = found.rates["edges"].numpy(), found.rates["items"].tolist()
        assert counts == np.histogram(mass / share, [*edges, np.inf])[0].tolist()


def test_error_rates_count_missed_and_wrong_retrievals():
    own = torch.arange(4)
    retrieved = torch.tensor([[0], [0], [2], [0]])  # item 0 attracts queries 1 and 3; item 1 and item 3 are missed
    mass = torch.tensor([2.6, 0.3, 0.9, 0.2])
    rates = error_rates(mass, retrieved, own, own, edges=(0.0, 0.5, 2.0))
    assert rates["items"].tolist() == [2, 1, 1]
    assert rates["false_negative"].tolist() == [1.0, 0.0, 0.0]
    assert rates["false_positive"].tolist() == pytest.approx([0.0, 0.0, 2 / 3])


def evaluated(normalizer):
    def split(seed, count=60):
        texts, videos = hubs(count, seed)
        return text_features(texts), video_features(videos)

    texts, videos = split(0)
    places = torch.arange(60)
    truth = GroundTruth(places, 60, "Toy", "test", "pairs")
    options = {"temperature": 2 * GAMMA, "measure_balance": True, "block_texts": 300, "block_videos": 25}
    evaluator = Evaluator(lambda text, video: Scores(text.sentence @ video.frames[:, 0].T), **options)
    return evaluator.evaluate(texts, places, videos, places, truth, normalizer, Bank(*split(100, 600)))


def test_biases_from_training_queries_lower_the_error_and_the_oracle_removes_it():
    plain, trained = evaluated(None), evaluated(SinkhornBias())
    exact = evaluated(SinkhornBias(queries="oracle", iterations=100))
    for direction in ("text-to-video", "video-to-text"):
        errors = [found.balance[direction].error for found in (plain, trained, exact)]
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 1e-3
    assert trained.text_to_video["R@1"] > plain.text_to_video["R@1"]


def test_results_show_the_balance_and_the_data_that_post_processing_used():
    options = {"method": "M", "select_on": "last", "checkpoint": None, "skipped": [], "config": {}}
    trained = results_of(evaluated(SinkhornBias()), **options, precision="32-true", seed=0)
    assert trained.balance["text-to-video"]["normalization_error"] > 0
    assert len(trained.balance["video-to-text"]["false_negative"]) == len(trained.balance["video-to-text"]["edges"])
    assert [row["transductive"] for row in trained.rows()] == [False, False]
    lines = "\n".join(captions(trained))
    assert "Sinkhorn (train queries, the method's gamma" in lines
    assert "uses no other test query" in lines
    assert "Normalization error" in lines
    oracle = results_of(evaluated(SinkhornBias(queries="oracle")), **options, precision="32-true", seed=0)
    assert oracle.transductive
    assert "uses the whole test set" in "\n".join(captions(oracle))
