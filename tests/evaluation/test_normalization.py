"""Score normalisation against the released codes and the papers' equations; what each one says of itself."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from metric_rows import normalization_error, summarize
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import normalize

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.external_scores import evaluate_scores
from tvr_lightning.evaluation.normalization import (
    Context,
    DualSoftmax,
    Normalizer,
    NormalizerChain,
    QueryBankNorm,
    SinkhornBias,
    normalize_scores,
)
from tvr_lightning.evaluation.ranks import text_to_video_ranks, video_to_text_ranks
from tvr_lightning.evaluation.sources import Block, MatrixSource, ScoreSource, best_of_gallery, gallery_logsumexp
from tvr_lightning.layers.sinkhorn import sinkhorn_biases


class PiecesSource(ScoreSource):
    """A matrix in pieces of uneven size, as an evaluation that does not fit the memory gives it."""

    def __init__(self, matrix: torch.Tensor, rows: int, columns: int) -> None:
        super().__init__(*matrix.shape, matrix.device)
        self.matrix, self.steps = matrix, (rows, columns)

    def blocks(self):
        for column in range(0, self.gallery, self.steps[1]):
            for row in range(0, self.queries, self.steps[0]):
                rows = slice(row, min(row + self.steps[0], self.queries))
                columns = slice(column, min(column + self.steps[1], self.gallery))
                yield Block(self.matrix[rows, columns], rows, columns)


def scores(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    texts, videos = torch.randn(rows, 6, generator=generator), torch.randn(columns, 6, generator=generator)
    return (normalize(texts, dim=-1) @ normalize(videos, dim=-1).T).double()


@pytest.fixture
def released(parity_cases) -> dict[str, torch.Tensor]:
    return load_file(parity_cases / "metrics.safetensors")


def assert_row(row: dict[str, float], cases: Path, name: str) -> None:
    expected = json.loads((cases / "metrics.json").read_text())[name]
    names = {"R@1": "R1", "R@5": "R5", "R@10": "R10", "MdR": "MedianR", "MnR": "MeanR"}
    assert {key: row[key] for key in names} == pytest.approx({key: expected[value] for key, value in names.items()})


def test_dual_softmax_equals_the_released_code_in_both_directions(parity_cases, released):
    similarity = released["single.similarity"]
    own = torch.arange(len(similarity))
    forward = normalize_scores(DualSoftmax(), similarity)
    backward = normalize_scores(DualSoftmax(), similarity.T, direction="video-to-text").T
    torch.testing.assert_close(forward, released["dsl.t2v.similarity"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(backward, released["dsl.v2t.similarity"], rtol=1e-9, atol=1e-12)
    assert_row(summarize(text_to_video_ranks(forward, own)), parity_cases, "dsl.t2v")
    assert_row(summarize(video_to_text_ranks(backward, own)), parity_cases, "dsl.v2t")


@pytest.mark.parametrize("offset", [0.0, -2.0])
@pytest.mark.parametrize("chained", [False, True])
def test_dual_softmax_of_scores_below_zero_is_marked_and_warned_of_once(offset, chained):
    similarity = scores(9, 9).abs() + offset
    normalizer: Normalizer = NormalizerChain([DualSoftmax()]) if chained else DualSoftmax()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluation, _ = evaluate_scores(similarity, GroundTruth(torch.arange(9), 9, "Toy", "test", "pairs"), normalizer)
    expected = ["some scores are below zero, and dual softmax can reverse their order"] if offset else []
    assert evaluation.warnings == expected
    assert [str(warning.message) for warning in caught] == [
        f"{normalizer.name}: {mark}. Choose another normalization." for mark in expected
    ]


def test_dual_softmax_sharpens_with_its_temperature():
    similarity = scores(9, 9)
    mild, sharp = (normalize_scores(DualSoftmax(t), similarity) / similarity for t in (1.0, 50.0))
    assert sharp.max(0).values.min() > mild.max(0).values.max()
    torch.testing.assert_close(mild.sum(0), torch.ones(9, dtype=torch.float64))


def test_query_bank_norm_equals_the_released_code(parity_cases, released):
    similarity, bank = released["single.similarity"], released["qbnorm.bank_similarity"]
    result = normalize_scores(QueryBankNorm(), similarity, bank)
    torch.testing.assert_close(result, released["qbnorm.similarity"], rtol=1e-9, atol=1e-12)
    assert_row(summarize(text_to_video_ranks(result, torch.arange(60))), parity_cases, "qbnorm.t2v(k=1,beta=20)")
    unchanged = (result == similarity).all(1)
    assert 0 < unchanged.sum() < 60


def test_query_bank_norms_options_widen_and_narrow_what_is_popular():
    similarity, bank = scores(40, 25), scores(50, 25, seed=1)

    def normalized_queries(normalizer: QueryBankNorm) -> int:
        return int((normalize_scores(normalizer, similarity, bank) != similarity).any(1).sum())

    few, plain, many = (normalized_queries(QueryBankNorm(**o)) for o in ({"occurrences": 4}, {}, {"k": 25}))
    assert few < plain < many == 40
    factors = [normalize_scores(QueryBankNorm(beta, k=25), similarity, bank) for beta in (1.0, 20.0)]
    assert not torch.allclose(*factors)


@pytest.mark.parametrize("case", ["ncl", "ncl_gamma_0.01"])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_sinkhorn_biases_and_ranks_equal_the_equations(parity_cases, case, precision):
    path = parity_cases / f"{case}.safetensors"
    with safe_open(path, "pt") as file:
        gamma = json.loads(file.metadata()["config"])["gamma"]
    tensors = load_file(path)
    unit = {
        name: normalize(tensors[f"input.{name}_embedding"].double(), dim=-1)
        for name in ("text", "video", "queue_text", "queue_video")
    }
    similarity = (unit["text"] @ unit["video"].T).to(precision)
    banks = {
        "t2v": (unit["queue_text"] @ unit["video"].T).to(precision),
        "v2t": (unit["queue_video"] @ unit["text"].T).to(precision),
    }
    own = torch.arange(len(similarity))
    for queries, prefix in (("oracle", "expected.iterations_4"), ("train", "expected.queue.iterations_4")):
        normalizer = SinkhornBias(gamma, queries)
        forward = normalize_scores(normalizer, similarity, banks["t2v"])
        backward = normalize_scores(normalizer, similarity.T, banks["v2t"], "video-to-text")
        tolerance = {"rtol": 1e-9, "atol": 1e-9} if precision == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        for result, scored, side in ((forward, similarity, "video"), (backward, similarity.T, "text")):
            bias = tensors[f"{prefix}.{side}_bias"]
            torch.testing.assert_close((result - scored).double(), bias.expand_as(result), **tolerance)
        assert (text_to_video_ranks(forward, own).better + 1).tolist() == tensors[f"{prefix}.rank_t2v"].tolist()
        assert (video_to_text_ranks(backward.T, own).better + 1).tolist() == tensors[f"{prefix}.rank_v2t"].tolist()


@pytest.mark.parametrize("marginals", ["uniform", "count"])
@pytest.mark.parametrize("queries", ["oracle", "train"])
def test_several_captions_equal_the_equations(parity_cases, queries, marginals):
    tensors = load_file(parity_cases / "ncl_multi_caption.safetensors")
    owner, similarity = tensors["input.caption_video"], tensors["expected.cosine"]
    unit = {
        name: normalize(tensors[f"input.{name}_embedding"].double(), dim=-1)
        for name in ("text", "video", "queue_text", "queue_video")
    }
    counts, ones = torch.bincount(owner).double(), torch.ones(len(owner), dtype=torch.float64)
    normalizer = SinkhornBias(0.05, queries, marginals=marginals)
    forward = normalize_scores(
        normalizer, similarity, unit["queue_text"] @ unit["video"].T, "text-to-video", ones, counts
    )
    backward = normalize_scores(
        normalizer, similarity.T, unit["queue_video"] @ unit["text"].T, "video-to-text", counts, ones
    )
    prefix = f"expected.{'queue' if queries == 'train' else 'oracle'}.{marginals}.iterations_4"
    torch.testing.assert_close(forward - similarity, tensors[f"{prefix}.video_bias"].expand_as(forward))
    torch.testing.assert_close(backward - similarity.T, tensors[f"{prefix}.text_bias"].expand_as(backward))
    ranks = text_to_video_ranks(forward, owner), video_to_text_ranks(backward.T, owner)
    assert (ranks[0].better + 1).tolist() == tensors[f"{prefix}.rank_t2v"].tolist()
    assert (ranks[1].better + 1).tolist() == tensors[f"{prefix}.rank_v2t"].tolist()


def test_streamed_biases_equal_the_layers():
    similarity = scores(17, 11)
    result = normalize_scores(SinkhornBias(0.1, "oracle", iterations=7), similarity)
    _, bias = sinkhorn_biases(similarity, 0.1, 7)
    torch.testing.assert_close(result, similarity + bias)


@pytest.mark.parametrize("pieces", [(1, 1), (4, 5), (100, 3)])
def test_pieces_of_a_matrix_give_what_the_matrix_gives(pieces):
    similarity, bank = scores(13, 12), scores(20, 12, seed=1)
    for normalizer in (DualSoftmax(20.0), QueryBankNorm(k=3), SinkhornBias(0.1)):
        adjust = normalizer.fit(PiecesSource(similarity, *pieces), Context(bank=PiecesSource(bank, *pieces)))
        whole = normalize_scores(normalizer, similarity, bank)
        part = adjust(similarity[2:9, 3:8], slice(2, 9), slice(3, 8))
        torch.testing.assert_close(part, whole[2:9, 3:8])
    for source in (PiecesSource(similarity, *pieces), MatrixSource(similarity)):
        assert best_of_gallery(source, 3)[1].tolist() == similarity.topk(3).indices.tolist()
        torch.testing.assert_close(gallery_logsumexp(source, 100.0), (100 * similarity).logsumexp(0))


def test_a_chain_applies_one_after_the_other():
    similarity, bank = scores(13, 12), scores(20, 12, seed=1)
    first, second = SinkhornBias(0.1), DualSoftmax(20.0)
    expected = normalize_scores(second, normalize_scores(first, similarity, bank))
    chain = NormalizerChain([first, second])
    torch.testing.assert_close(normalize_scores(chain, similarity, bank), expected)
    assert chain.name == f"{first.name}, then {second.name}"
    assert chain.needs_bank
    assert chain.transductive


def test_recipes_name_normalisers_by_their_bare_class():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--normalizer", type=Normalizer)
    chain = [{"class_path": "SinkhornBias", "init_args": {"queries": "oracle"}}, {"class_path": "DualSoftmax"}]
    parsed = parser.parse_object({"normalizer": {"class_path": "NormalizerChain", "init_args": {"normalizers": chain}}})
    assert [part.class_path.rpartition(".")[2] for part in parsed.normalizer.init_args.normalizers] == [
        "SinkhornBias",
        "DualSoftmax",
    ]
    assert parsed.normalizer.init_args.normalizers[1].init_args.temperature == 100.0


def test_each_says_whether_it_uses_the_test_set_as_a_whole():
    said = {
        normalizer.name: (normalizer.transductive, normalizer.needs_bank)
        for normalizer in (
            DualSoftmax(),
            QueryBankNorm(),
            QueryBankNorm(occurrences=2),
            SinkhornBias(),
            SinkhornBias(0.01, queries="oracle"),
            SinkhornBias(marginals="count"),
            NormalizerChain([QueryBankNorm()]),
        )
    }
    assert said == {
        "dual softmax (temperature 100)": (True, False),
        "QB-Norm (beta 20, k 1)": (False, True),
        "QB-Norm (beta 20, k 1, occurrences 2)": (False, True),
        "Sinkhorn (train queries, the method's gamma, 4 iterations, uniform marginals)": (False, True),
        "Sinkhorn (oracle queries, gamma 0.01, 4 iterations, uniform marginals)": (True, False),
        "Sinkhorn (train queries, the method's gamma, 4 iterations, count marginals)": (True, True),
    }


@pytest.mark.parametrize(
    "normalizer", [QueryBankNorm(), SinkhornBias(0.01), NormalizerChain([QueryBankNorm()])], ids=lambda n: n.name
)
def test_what_says_it_is_not_transductive_answers_each_query_alone(normalizer):
    similarity, bank = scores(30, 12), scores(20, 12, seed=1)
    together = normalize_scores(normalizer, similarity, bank)
    for i in range(0, 30, 7):
        torch.testing.assert_close(normalize_scores(normalizer, similarity[[i]], bank)[0], together[i])


def test_normalisation_error_equals_the_equation_and_falls_under_biases(parity_cases):
    tensors = load_file(parity_cases / "ncl.safetensors")
    cosine = tensors["expected.cosine"]
    for prefix, text_bias, video_bias in (
        ("expected.plain", 0, 0),
        (
            "expected.iterations_4",
            tensors["expected.iterations_4.text_bias"],
            tensors["expected.iterations_4.video_bias"],
        ),
    ):
        forward, backward = (
            normalization_error(cosine + video_bias, 0.05),
            normalization_error(cosine.T + text_bias, 0.05),
        )
        assert forward == pytest.approx(tensors[f"{prefix}.normalisation_error_t2v"].item())
        assert backward == pytest.approx(tensors[f"{prefix}.normalisation_error_v2t"].item())
    assert forward < tensors["expected.plain.normalisation_error_t2v"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DualSoftmax(0.0), "positive temperature"),
        (lambda: QueryBankNorm(k=0), "k >= 1"),
        (lambda: SinkhornBias(temperature=-1.0), "temperature > 0"),
        (lambda: SinkhornBias(iterations=0), "iterations >= 1"),
        (lambda: NormalizerChain([]), "at least one"),
        (lambda: NormalizerChain([DualSoftmax(), QueryBankNorm()]), "must come first"),
        (lambda: normalize_scores(QueryBankNorm(), scores(3, 3)), "Pass a bank"),
        (lambda: normalize_scores(SinkhornBias(0.01), scores(3, 3)), "Pass a bank"),
        (lambda: normalize_scores(SinkhornBias(queries="oracle"), scores(3, 3)), "needs the temperature"),
        (lambda: normalize_scores(SinkhornBias(0.01, "oracle", marginals="count"), scores(3, 3)), "matches of each"),
    ],
)
def test_what_cannot_work_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
