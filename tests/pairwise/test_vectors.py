"""Both forms of pair vectors give the same results for every operation; products of tokens."""

import pytest
import torch
from methods.parts import close
from torch import nn

from tvr_lightning.pairwise import DensePairVectors, PairVectors, mapped_between, tiles, token_similarities
from tvr_lightning.pairwise.basis_terms import BasisTerms

N, M, F, W = 4, 3, 5, 6
FORMS = (PairVectors, DensePairVectors)


@pytest.fixture(params=[16, 8], ids=["fewer vectors than D", "more vectors than D"])
def parts(request):
    torch.manual_seed(0)
    D = request.param
    linear, norm = nn.Linear(D, D), nn.LayerNorm(D, eps=1e-6)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    nn.init.normal_(norm.bias, 0.0, 0.3)
    return {
        "linear": linear.double(),
        "bare": nn.Linear(D, D, bias=False).double(),
        "other": nn.Linear(D, D).double(),
        "norm": norm.double(),
        "sentence": torch.randn(N, 1, D, dtype=torch.double),
        "words": torch.randn(N, W, D, dtype=torch.double),
        "video": torch.randn(M, 1, D, dtype=torch.double),
        "frames": torch.randn(M, F, D, dtype=torch.double),
        "slot_frames": torch.randn(M, W, D, dtype=torch.double),
        "weights": torch.randn(M, F, N, W, dtype=torch.double),
        "word_weights": torch.randn(M, W, N, 1, dtype=torch.double),
        "factor": torch.rand(M, N, W, dtype=torch.double) + 0.5,
    }


def attended(form, p):
    return form.mix(p["weights"], p["frames"])


def gap(form, p):
    return form.from_videos(p["video"], texts=N) - form.from_texts(p["sentence"], videos=M)


def tail(form, p):
    hidden = attended(form, p).layer_norm(p["norm"])
    return (hidden + hidden.linear(p["linear"])).layer_norm(p["norm"])


EXPRESSIONS = {
    "texts": lambda form, p: form.from_texts(p["words"], videos=M),
    "one text": lambda form, p: form.from_texts(p["sentence"], videos=M),
    "videos": lambda form, p: form.from_videos(p["slot_frames"], texts=N),
    "mix of frames": attended,
    "mix of words": lambda form, p: form.mix(p["word_weights"], p["words"], side="text"),
    "gap": gap,
    "normed gap": lambda form, p: gap(form, p).layer_norm(p["norm"]).linear(p["linear"]),
    "tail of attention": tail,
    "tail and gap": lambda form, p: tail(form, p) + gap(form, p).layer_norm(p["norm"]),
    "gap of tail": lambda form, p: form.from_texts(p["words"], videos=M) - tail(form, p).linear(p["bare"]),
    "words and video slots": lambda form, p: (
        form.from_texts(p["words"], videos=M) + form.from_videos(p["slot_frames"], texts=N)
    ).layer_norm(p["norm"]),
    "word mix in a sum": lambda form, p: (
        form.mix(p["word_weights"], p["words"], side="text").linear(p["linear"]) + attended(form, p)
    ).layer_norm(p["norm"]),
    "sum of lifted": lambda form, p: form.from_texts(p["words"], videos=M) + form.from_texts(p["sentence"], videos=M),
    "scaled": lambda form, p: tail(form, p).scale(p["factor"]).linear(p["linear"]),
    "scaled lifted": lambda form, p: form.from_texts(p["words"], videos=M).scale(p["factor"]),
    "unit": lambda form, p: tail(form, p).unit(),
    "selected": lambda form, p: tail(form, p)[:, :, 1:4],
    "selected lifted": lambda form, p: form.from_texts(p["words"], videos=M)[:, :, 2:6],
    "selected sum": lambda form, p: (tail(form, p) + gap(form, p))[:, :, :1],
    "selected gap": lambda form, p: gap(form, p)[:, :, :1].linear(p["linear"]),
    "norm twice": lambda form, p: tail(form, p).layer_norm(p["norm"]).linear(p["bare"]).layer_norm(p["norm"]),
}


@pytest.mark.parametrize("loops", [("cpu",), ()], ids=["loops", "at once"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_operation_gives_the_same_result_in_both_forms(parts, name, gradients, loops, monkeypatch):
    monkeypatch.setattr(tiles, "FAST_LOOPS", loops)
    monkeypatch.setattr(tiles, "TILE", 2 * parts["frames"].shape[-1])  # several tiles
    words, frames = parts["words"], parts["frames"]
    with torch.set_grad_enabled(gradients):  # without gradients, buffers are used again
        fast, dense = (EXPRESSIONS[name](form, parts) for form in FORMS)
        more = [[kind(form, parts) for form in FORMS] for kind in (gap, tail, EXPRESSIONS["videos"])]

        def agree(verb, expected=None):
            torch.testing.assert_close(verb(fast), (expected or verb)(dense), rtol=1e-10, atol=1e-10)

        assert (fast.videos, fast.texts, fast.slots) == (dense.videos, dense.texts, dense.slots)
        for verb in (
            lambda x: x.materialize(),
            lambda x: x.dot(words),
            lambda x: x.dot(words[:, :1]),
            lambda x: x.dot_frames(frames),
            lambda x: x.norm(),
            lambda x: x.logits(frames, parts["linear"], parts["other"], "video"),
            lambda x: x.logits(words, parts["linear"], parts["other"], "text"),
        ):
            agree(verb)
        for pair in more:
            if {fast.slots, pair[0].slots} <= {1, max(fast.slots, pair[0].slots)}:
                torch.testing.assert_close(fast.inner(pair[0]), dense.inner(pair[1]), rtol=1e-10, atol=1e-10)
                torch.testing.assert_close(pair[0].inner(fast), pair[1].inner(dense), rtol=1e-10, atol=1e-10)


def test_gradients_agree_between_the_forms(parts):
    grads = []
    for form in FORMS:
        leaves = {k: v.detach().clone().requires_grad_() for k, v in parts.items() if isinstance(v, torch.Tensor)}
        p = parts | leaves
        vectors = (tail(form, p) + gap(form, p).layer_norm(p["norm"])).unit()
        loss = vectors.dot(p["words"]).tanh().sum() + vectors.dot_frames(p["frames"]).tanh().sum()
        inputs = [p[k] for k in ("sentence", "words", "video", "frames", "weights")]
        grads.append(torch.autograd.grad(loss, [*inputs, *p["linear"].parameters(), *p["norm"].parameters()]))
    close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_computed_in_float32_and_float64_stays(parts, form):
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        vectors = form.mix(parts["weights"].to(dtype), parts["frames"].to(dtype)).linear(parts["linear"])
        assert vectors.layer_norm(parts["norm"]).dot(parts["words"].to(dtype)).dtype == expected
        assert form.from_texts(parts["words"].to(dtype), videos=M).materialize().dtype == expected
        assert form.from_videos(parts["frames"].to(dtype), texts=N).materialize().dtype == expected


def test_dropout_and_later_operations_are_the_same_in_both_forms(parts):
    found = []
    for form in FORMS:
        torch.manual_seed(0)
        x, other = attended(form, parts), form.from_texts(parts["words"][:, :1], M)
        dropped = x.dropout(0.3)
        both = x + dropped
        results = [
            dropped.materialize(), both.layer_norm(parts["norm"]).norm(), (dropped + x).dot(parts["words"]),
            dropped.inner(x), x.inner(dropped), both.cosine(other), (other + dropped).norm(), (dropped - x).norm(),
            *(part.dot(parts["words"]) for part in both.unit().divided(0)[1:]), both.unit().dot_frames(parts["frames"]),
            both.unit()[:, :, :1].scale(torch.full((M, N, 1), 2.0, dtype=torch.double)).norm(),
        ]  # fmt: skip
        found.append(results)
        kept, whole = results[0] != 0, x.materialize()
        torch.testing.assert_close(results[0][kept], whole[kept] / 0.7, rtol=2e-4, atol=0)
        assert 0.6 < kept.double().mean() < 0.8
        assert torch.equal(x.dropout(0.0).materialize(), whole)
    close(*found)


def test_zero_vectors_have_a_gradient(parts):
    size = parts["frames"].shape[-1]
    frames = torch.zeros(M, F, size, dtype=torch.double, requires_grad=True)
    unit = PairVectors.mix(parts["weights"], frames).unit()
    assert torch.equal(unit.materialize(), torch.zeros(N, M, W, size, dtype=torch.double))
    unit.dot(parts["words"]).sum().backward()
    assert frames.grad.isfinite().all()


def test_bad_shapes_are_rejected(parts):
    with pytest.raises(ValueError, match="cannot be combined"):
        attended(PairVectors, parts) + attended(PairVectors, parts)[:, :, :2]
    with pytest.raises(ValueError, match="cannot be combined"):
        PairVectors.from_texts(parts["words"], videos=M) + PairVectors.from_texts(parts["words"], videos=M + 1)
    with pytest.raises(ValueError, match="need a basis"):
        PairVectors((M, N, W), BasisTerms())


def test_token_similarities_are_products_of_all_tokens():
    video, text = torch.randn(M, F, 8), torch.randn(N, 2, 8)
    torch.testing.assert_close(token_similarities(video, text), torch.einsum("mfd,nwd->fmwn", video, text))
    assert token_similarities(video, text).is_contiguous()
    assert token_similarities(video[:0], text).shape == (F, 0, 2, N)
    for wrong in (text[0], torch.randn(N, 2, 9)):
        with pytest.raises(ValueError, match="token_similarities needs"):
            token_similarities(video, wrong)


def test_matrices_are_applied_to_the_side_with_fewer_tokens():
    first, second = torch.randn(2, 8, 8, dtype=torch.double)
    for videos, texts in ((1, 9), (9, 1)):
        video, text = torch.randn(videos, F, 8).double(), torch.randn(texts, F, 8).double()
        frames, words = mapped_between(video, text, first, second)
        assert (frames is video, words is text) == (videos > texts, texts > videos)
        expected = torch.einsum("mfd,nwd->fmwn", video, text @ first @ second)
        torch.testing.assert_close(token_similarities(frames, words), expected)
    assert mapped_between(video, text)[1] is text
