"""GARE against its equations, pair by pair and in both forms of pair vectors, and its regularization."""

import dataclasses
import math

import pytest
import torch
from methods.parts import DOUBLE, FORMS, WIDTH, close, encoder, features, moved, paired
from metric_rows import text_features
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from tvr_lightning.features import VideoFeatures
from tvr_lightning.methods.gare.increments import Increments
from tvr_lightning.methods.gare.method import GARE
from tvr_lightning.methods.gare.model import (
    GAREHead,
    directional_diversity,
    norm_variance,
    relaxed_bottleneck,
)
from tvr_lightning.methods.gare.options import (
    Bottleneck,
    GapIncrement,
    GAREOptions,
    LogMeanExp,
    LogSumExp,
    MeanPooling,
    NoIncrement,
    Orthogonal,
    TextIncrement,
    TextPooling,
    Variance,
)
from tvr_lightning.pairwise import DensePairVectors, PairVectors, tiles
from tvr_lightning.training.losses import info_nce

N, M, W, FRAMES, D = 5, 4, 6, 3, 16


def inputs():
    return features(N, M, words=W, frames=FRAMES, width=D, **DOUBLE)


def gap(**options):
    return GapIncrement(**{"dropout": 0.0} | options)


def random_head(form=None, **options):
    torch.manual_seed(1)
    head = moved(GAREHead(D, W, FRAMES, GAREOptions(**{"increment": gap()} | options)).double())
    head.required_form = FORMS.get(form)
    return head


SWITCHES = [
    {},
    {"increment": gap(context="words")},
    {"increment": gap(sign=-1)},
    {"increment": gap(corrected="video")},
    {"increment": gap(corrected="video", context="words")},
    {"increment": gap(corrected="video"), "pooling": MeanPooling()},
    {"increment": TextIncrement(dropout=0.0)},
    {"increment": TextIncrement(dropout=0.0), "mask_frames": True},
    {"pooling": MeanPooling()},
    {"pooling": TextPooling(temperature=0.5)},
    {"mask_frames": True},
    {"mask_frames": True, "increment": gap(context="words")},
    {"increment": NoIncrement()},
    {"increment": NoIncrement(), "pooling": MeanPooling(), "mask_frames": True},
]


def psi(network, query, context):
    """psi of one query (D,) and one context (K, D), as the paper writes it and psi_module.py computes it."""
    q = network.q_proj(network.layer_norm1(query))
    c = network.layer_norm1(context)
    attention = (network.k_proj(c) @ q / math.sqrt(D)).softmax(0)
    hidden = network.layer_norm2(network.out_proj(attention @ network.v_proj(c)))
    return network.mean_proj(network.layer_norm3(hidden + network.linear1(hidden)))


def of_one_pair(head, sentence, words, word_mask, frames, frame_mask):
    """Cosine and increment of one pair, from vectors."""
    options, increment = head.options, None
    mean = frames[frame_mask].mean(0) if options.mask_frames else frames.mean(0)
    pooled = mean
    if isinstance(options.pooling, TextPooling):
        logits = frames @ sentence / options.pooling.temperature
        if options.mask_frames:
            logits = logits.masked_fill(~frame_mask, -math.inf)
        pooled = (logits.softmax(0) * frame_mask) @ frames
    if head.psi is not None:
        kind = options.increment
        context = words[word_mask] if kind.words else frames
        if isinstance(kind, TextIncrement):
            direction = F.normalize(mean - psi(head.psi, sentence, context), dim=0)
            cosines = F.cosine_similarity(sentence[None], frames) * frame_mask
            increment = head.magnitude(cosines).exp() * direction
        else:
            increment = psi(head.psi, kind.sign * (mean - sentence), context)
        if kind.corrected == "text":
            sentence = sentence + increment
        else:
            pooled = pooled + increment
    return F.cosine_similarity(sentence, pooled, dim=0), increment


@pytest.mark.parametrize("options", SWITCHES)
def test_every_option_matches_the_paper_pair_by_pair_in_both_forms(options):
    text, video = inputs()
    gradients = []
    for form, kind in FORMS.items():
        head = random_head(form, **options)
        assert head.form is kind
        scores = head(text, video, head.psi is not None)
        for i in range(N):
            for j in range(M):
                cosine, increment = of_one_pair(
                    head, text.sentence[i], text.words[i], text.word_mask[i], video.frames[j], video.frame_mask[j]
                )
                torch.testing.assert_close(scores.similarity[i, j], cosine, rtol=1e-9, atol=1e-10)
                if increment is not None:
                    torch.testing.assert_close(scores.parts["increment"][i, j], increment, rtol=1e-9, atol=1e-9)
        loss = info_nce(20 * scores.similarity[:M])
        if head.psi is not None:
            loss = loss + relaxed_bottleneck(scores.parts["increment"][:M], Bottleneck())
        parameters = list(head.parameters())
        gradients.append(torch.autograd.grad(loss, parameters) if parameters else ())
    close(*gradients, rtol=1e-7, atol=1e-9)
    if options:
        assert not torch.allclose(scores.similarity, random_head()(text, video).similarity, atol=1e-6)


def test_psi_has_the_number_of_parameters_of_the_paper():
    head = GAREHead(512, 32, 12, GAREOptions())
    assert sum(p.numel() for p in head.parameters()) == 1_579_008  # 1.58 M, appendix I
    assert not list(GAREHead(512, 32, 12, GAREOptions(increment=NoIncrement())).parameters())


def test_the_geometry_is_that_of_the_increments():
    text, video = inputs()
    head = random_head()
    increment = head(text, video, True).parts["increment"]
    t, v = text.sentence[:, None], video.frames.mean(1)[None]
    expected = {
        "angle_to_gap": F.cosine_similarity(increment, v - t, dim=-1).acos(),
        "angle_to_text": F.cosine_similarity(increment, t, dim=-1).acos(),
        "increment_norm": increment.norm(dim=-1),
        "text_norm": t.norm(dim=-1).expand(N, M),
        "corrected_norm": (t + increment).norm(dim=-1),
        "text_to_video": (v - t).norm(dim=-1),
        "corrected_to_video": (t + increment - v).norm(dim=-1),
    }
    torch.testing.assert_close(head.geometry(text, video), expected, rtol=1e-8, atol=1e-8)


def random_increments():
    return torch.randn(M, N, D, generator=torch.Generator().manual_seed(4), dtype=torch.double).transpose(0, 1)


@pytest.mark.parametrize("anchor", ["video", "text"])
@pytest.mark.parametrize(("prior", "normalize"), [(0.1, False), (10.0, True)])
def test_the_bottleneck_is_the_divergence_of_the_gaussian_of_each_anchor(anchor, prior, normalize):
    increment, config = random_increments(), Bottleneck(anchor=anchor, prior=prior, normalize=normalize)
    used = F.normalize(increment, dim=-1) if normalize else increment
    over = 0 if anchor == "video" else 1
    posterior, standard = Normal(used.mean(over), used.std(over) + 1e-6), Normal(0.0, prior)
    expected = kl_divergence(posterior, standard).sum(-1).mean()
    torch.testing.assert_close(relaxed_bottleneck(increment, config), expected)
    mean = dataclasses.replace(config, reduction="mean")
    torch.testing.assert_close(relaxed_bottleneck(increment, mean) * D, expected)


def bottleneck_gradient(form, dtype, order, config):
    """Gradient of an untrained psi, whose increments of one anchor differ by about 1e-5 at a length of 1."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(64, generator=generator)
    sentence = shared + 0.5 * torch.randn(8, 64, generator=generator)
    frames = shared.roll(7) + 0.5 * torch.randn(8, FRAMES, 64, generator=generator)
    video = VideoFeatures(frames, torch.ones(8, FRAMES, dtype=torch.bool))
    torch.manual_seed(0)
    head = GAREHead(64, W, FRAMES, GAREOptions(increment=gap())).to(dtype)
    head.required_form = FORMS[form]
    scores = head(text_features(sentence)[order].to(dtype), video[order].to(dtype), True)
    relaxed_bottleneck(scores.parts["increment"], config).backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in head.parameters()])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"anchor": "text"}, {"normalize": True}])
def test_gradients_of_almost_equal_increments_match_float64(form, options):
    config, order = Bottleneck(**options), torch.arange(8)
    expected = bottleneck_gradient("dense", torch.double, order, config)
    for turned in (order, order.roll(4)):  # as two processes would gather them
        found = bottleneck_gradient(form, torch.float, turned, config)
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_norm_variance_is_limited_by_its_floor():
    increment = random_increments().requires_grad_()
    variance = increment.norm(dim=-1).var(1).mean().detach()
    below = norm_variance(increment, Variance(floor=0.5 * float(variance)))
    assert below == 0
    assert not torch.autograd.grad(below, increment)[0].any()
    assert norm_variance(increment / 100, Variance()) < 0  # the floor is 0.5 by default
    assert norm_variance(increment * 100, Variance()) == 0


def test_smooth_norm_variance_and_directional_diversity_match_the_paper():
    increment = random_increments()
    lengths, unit = increment.norm(dim=-1), F.normalize(increment, dim=-1)
    distances, cosine = (lengths - lengths.mean(1, keepdim=True)).square(), unit @ unit.mT
    smooth = (1 + (-distances).exp().mean(1)).log().mean()
    torch.testing.assert_close(norm_variance(increment, LogSumExp()), smooth)
    for alpha in (2.0, 0.5):  # Eq. 11
        expected = ((-alpha * (1 - cosine)).exp().mean((1, 2)) + 1e-8).log().mean()
        torch.testing.assert_close(directional_diversity(increment, LogMeanExp(alpha=alpha)), expected)
    others = (cosine * (1 - torch.eye(M))).square().sum() / (N * M**2)
    torch.testing.assert_close(directional_diversity(increment, Orthogonal()), others)


@pytest.mark.parametrize("increment", [torch.ones(3, 4, 6), torch.zeros(3, 4, 6)])
def test_equal_increments_have_finite_gradients(increment):
    increment.requires_grad_()
    terms = [norm_variance(increment, Variance()), directional_diversity(increment, LogMeanExp())]
    terms += [relaxed_bottleneck(increment, Bottleneck(anchor=anchor)) for anchor in ("video", "text")]
    sum(terms).backward()
    assert increment.grad.isfinite().all()


def module(**options):
    torch.manual_seed(0)
    return GARE(encoder(), words=W, frames=FRAMES, gare=GAREOptions(**{"temporal_layers": 1} | options))


def pairs(method, count=M):
    text, video = features(count, count, words=W, frames=FRAMES, width=WIDTH)
    return paired(method.encode_text(text), method.encode_video(video))


def test_the_temperature_can_be_fixed():
    fixed = module(fixed_temperature=0.02).temperature
    assert float(fixed()) == pytest.approx(50, rel=1e-5)
    assert not fixed.logit_scale.requires_grad
    assert module().temperature.logit_scale.requires_grad


def test_terms_are_left_out_with_weight_zero_without_increments_or_with_one_pair():
    kinds = {"bottleneck": Bottleneck, "norm_variance": Variance, "direction": LogMeanExp}
    for kept in (*kinds, None):
        method = module(**{name: kind(weight=0.0) for name, kind in kinds.items() if name != kept})
        assert set(method.losses(pairs(method))) == {"info_nce", *([kept] if kept else [])}
    baseline = module(increment=NoIncrement())
    assert set(baseline.losses(pairs(baseline))) == {"info_nce"}
    method = module()
    with pytest.warns(UserWarning, match="a batch of one pair has no variance"):
        assert set(method.losses(pairs(method, 1))) == {"info_nce"}


# Measures of increments and cosines of corrected texts


@pytest.fixture(params=[tiles.TILE, 50], ids=["one tile", "several tiles"])
def tile(request, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("used", [slice(4), slice(2), slice(2, 4)], ids=["all", "products", "moments"])
def test_measures_and_gradients_match_plain_operators(over, used):
    vectors = random_increments().requires_grad_()
    measured = Increments(vectors, over)
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    found = [measured.lengths, measured.cosines, measured.mean, measured.deviation]
    expected = [vectors.norm(dim=-1), unit @ unit.transpose(1, 2), vectors.mean(over), vectors.std(over)]
    close(found, expected)
    gradients = [
        torch.autograd.grad(sum((each.sin() * place).sum() for place, each in enumerate(some[used], 1)), vectors)[0]
        for some in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("slots", [1, 2])
def test_cosines_of_corrected_texts_have_the_gradients_of_plain_operators(slots):
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.double, requires_grad=True)

    vectors, texts, weights, frames = drawn(3, 5, slots, 6), drawn(5, 1, 6), drawn(3, 2, 5, slots), drawn(3, 2, 6)
    for corrects in (True, False):
        found = []
        for form in (PairVectors, DensePairVectors):
            corrected = DensePairVectors(vectors)
            if corrects:
                corrected = form.from_texts(texts, videos=3) + corrected
            cosine = corrected.cosine(form.mix(weights, frames))
            ask = [vectors, weights, frames, texts]
            found.append((cosine, *torch.autograd.grad(cosine.sin().sum(), ask, materialize_grads=True)))
        close(*found)
