"""GARE against the authors' code, against its equations pair by pair, and both forms over every switch."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from parity.case import load_case
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn import functional as F

from tvr_lightning.audit.experiments import audit_scores
from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods.gare.method import GARE
from tvr_lightning.methods.gare.model import (
    GAREHead,
    directional_diversity,
    norm_variance,
    relaxed_bottleneck,
    trust_region_step,
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
from tvr_lightning.pairwise import DensePairVectors, PairVectors
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.losses import info_nce

RECIPES = Path(__file__).parents[2] / "recipes"
N, M, W, FRAMES, D = 5, 4, 6, 3, 16


def random_features(seed=0, dtype=torch.double):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    words = torch.arange(W) < torch.tensor([[6], [4], [2], [5], [3]])
    frames = torch.arange(FRAMES) < torch.tensor([[3], [1], [2], [3]])
    return TextFeatures(normal(N, D), normal(N, W, D), words), VideoFeatures(normal(M, FRAMES, D), frames)


FORMS = {"factorised": PairVectors, "dense": DensePairVectors}


def gap(**options):
    return GapIncrement(**{"dropout": 0.0} | options)


def random_head(seed=1, form=None, **options):
    """A head in double precision whose parameters are away from their start, without dropout unless asked for."""
    torch.manual_seed(seed)
    head = GAREHead(D, W, FRAMES, GAREOptions(**{"increment": gap()} | options)).double()
    head.required_form = FORMS.get(form)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return head


SWITCHES = {
    "defaults": {},
    "words": {"increment": gap(context="words")},
    "minus": {"increment": gap(sign=-1)},
    "minus, words": {"increment": gap(sign=-1, context="words")},
    "corrected videos": {"increment": gap(corrected="video")},
    "corrected videos, words": {"increment": gap(corrected="video", context="words")},
    "corrected videos, words, minus": {"increment": gap(corrected="video", context="words", sign=-1)},
    "corrected mean": {"increment": gap(corrected="video"), "pooling": MeanPooling()},
    "no gap": {"increment": TextIncrement(dropout=0.0)},
    "no gap, mean": {"increment": TextIncrement(dropout=0.0, mask_context=True), "pooling": MeanPooling()},
    "mean": {"pooling": MeanPooling()},
    "temperature": {"pooling": TextPooling(temperature=0.5)},
    "masked frames": {"mask_frames": True},
    "masked frames and context": {"mask_frames": True, "increment": gap(mask_context=True)},
    "masked context": {"increment": gap(mask_context=True)},
    "unmasked words": {"increment": gap(context="words", mask_context=False)},
    "no increment": {"increment": NoIncrement()},
    "no increment, mean": {"increment": NoIncrement(), "pooling": MeanPooling(), "mask_frames": True},
}


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
        context, mask = (words, word_mask) if kind.words else (frames, frame_mask)
        if kind.mask_context or (kind.mask_context is None and kind.words):
            context = context[mask]
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


@pytest.mark.parametrize("form", ["factorised", "dense"])
@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_the_paper_pair_by_pair(name, form):
    text, video = random_features()
    head = random_head(form=form, **SWITCHES[name])
    with torch.no_grad():
        scores = head(text, video, head.psi is not None)
        for i in range(N):
            for j in range(M):
                cosine, increment = of_one_pair(
                    head, text.sentence[i], text.words[i], text.word_mask[i], video.frames[j], video.frame_mask[j]
                )
                torch.testing.assert_close(scores.similarity[i, j], cosine, rtol=1e-9, atol=1e-10)
                if increment is not None:
                    torch.testing.assert_close(scores.parts["increment"][i, j], increment, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_equal_in_both_forms_and_changes_something(name):
    text, video = random_features()
    results, grads = [], []
    for form in ("factorised", "dense"):
        head = random_head(form=form, **SWITCHES[name])
        assert head.form is (PairVectors if form == "factorised" else DensePairVectors)
        scores = head(text[:M], video, head.psi is not None)
        loss = info_nce(20 * scores.similarity)
        if head.psi is not None:
            loss = loss + relaxed_bottleneck(scores.parts["increment"], Bottleneck())
        results.append(head(text, video).similarity)
        parameters = list(head.parameters())
        grads.append(torch.autograd.grad(loss, parameters) if parameters else ())
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)
    for fast, dense in zip(*grads, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, dense, rtol=1e-7, atol=1e-9)
    if name != "defaults":
        assert not torch.allclose(results[0], random_head()(text, video).similarity, atol=1e-6)


def test_the_importer_takes_checkpoints_without_temporal_transformer(parity_cases):
    case = load_case(parity_cases / "gare.safetensors")
    msvd = {name: tensor for name, tensor in case.checkpoint.items() if not name.startswith("transformerClip.")}
    module = import_checkpoint(msvd, "msvd.bin", words=12, frames=6)
    assert module.temporal is None
    assert torch.equal(module.head.psi.q_proj.weight, msvd["psi.layers.0.cross_attn.q_proj.weight"])
    with pytest.raises(UserError, match=r"msvd\.bin: 77 words and 6 frames do not fit"):
        import_checkpoint(msvd, "msvd.bin", words=77, frames=6)
    deeper = {**msvd, "psi.layers.1.linear1.weight": torch.zeros(1)}
    with pytest.raises(UserError, match=r"1 unexpected: psi\.layers\.1\.linear1"):
        import_checkpoint(deeper, "msvd.bin", words=12, frames=6)


def test_psi_has_as_many_parameters_as_the_paper_says():
    head = GAREHead(512, 32, 12, GAREOptions())
    assert sum(p.numel() for p in head.parameters()) == 1_579_008  # 1.58 M, appendix I
    baseline = GAREHead(512, 32, 12, GAREOptions(increment=NoIncrement()))
    assert sum(p.numel() for p in baseline.parameters()) == 0


@pytest.mark.parametrize("name", SWITCHES)
def test_a_score_depends_on_its_own_text_and_video_only(name):
    text, video = random_features()
    rows, columns = torch.randperm(N), torch.randperm(M)
    head = random_head(**SWITCHES[name])
    scores = head(text, video).similarity
    torch.testing.assert_close(head(text[rows], video[columns]).similarity, scores[rows][:, columns])
    torch.testing.assert_close(head(text[2:3], video[1:2]).similarity, scores[2:3, 1:2])


@pytest.mark.parametrize("name", ["defaults", "corrected videos, words", "no gap", "no increment"])
def test_the_audit_finds_no_leak(name):
    head = random_head(**SWITCHES[name])
    text, video = random_features()
    audit = audit_scores(text, video, torch.tensor([0, 1, 2, 3, 1]), score=head)
    assert audit.findings
    assert not [finding for finding in audit.findings if finding.leaks]


@pytest.mark.parametrize("context", ["frames", "words"])
def test_a_small_budget_changes_nothing(context):
    text, video = random_features()
    whole, blocks = (random_head(increment=gap(context=context)) for _ in range(2))
    blocks.memory_gib = 8 * 8 * blocks.pair_numbers(text, video) / 2**30  # four pairs per block
    grads = []
    for head in (whole, blocks):
        scores = head(text, video, True)
        loss = scores.similarity.square().sum() + scores.parts["increment"].sin().sum()
        grads.append(
            (scores.similarity, scores.parts["increment"], *torch.autograd.grad(loss, list(head.parameters())))
        )
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("per", ["pair", "video"])
@pytest.mark.parametrize("kind", [GapIncrement, TextIncrement])
def test_dropout_draws_alike_in_both_forms_and_only_in_training(per, kind):
    text, video = random_features()
    trained = []
    for form in FORMS:
        head = random_head(form=form, increment=kind(dropout=0.3, dropout_per=per)).train()
        torch.manual_seed(0)
        scores = head(text, video, True)
        loss = scores.similarity.square().sum() + scores.parts["increment"].sin().sum()
        trained.append((scores.similarity, *torch.autograd.grad(loss, list(head.parameters()))))
        assert not torch.allclose(scores.similarity, head(text, video).similarity)
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)
    head.eval()
    without = random_head(increment=kind(dropout=0.0)).eval()
    torch.testing.assert_close(head(text, video).similarity, without(text, video).similarity)
    assert random_head(increment=gap(dropout=0.3)).train().form is PairVectors


@pytest.mark.parametrize(
    "switches",
    [
        {"mask_frames": True, "increment": gap(mask_context=True)},
        {"mask_frames": True, "increment": TextIncrement(dropout=0.0, mask_context=True)},
        {"mask_frames": True, "increment": gap(context="words")},
    ],
)
def test_masked_padding_says_nothing(switches):
    text, video = random_features()
    noise_text, noise_video = random_features(seed=9)
    words = torch.where(text.word_mask[..., None], text.words, noise_text.words)
    frames = torch.where(video.frame_mask[..., None], video.frames, noise_video.frames)
    head = random_head(**switches)
    expected = head(text, video).similarity
    other = head(dataclasses.replace(text, words=words), dataclasses.replace(video, frames=frames)).similarity
    torch.testing.assert_close(other, expected)
    released = random_head()
    changed = released(text, dataclasses.replace(video, frames=frames)).similarity
    assert not torch.allclose(changed, released(text, video).similarity)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_video_without_frames_scores_and_trains(name):
    text, video = random_features()
    video.frame_mask[0] = False
    head = random_head(**SWITCHES[name])
    similarity = head(text, video).similarity
    assert similarity.isfinite().all()
    if list(head.parameters()):
        similarity.sum().backward()
        assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)


def test_half_precision_features_are_scored_in_float32():
    text, video = random_features(dtype=torch.float32)
    text, video = text.to(torch.bfloat16), video.to(torch.bfloat16)
    head = random_head().float()
    expected = head(text.float(), video.float()).similarity
    with torch.autocast("cpu", dtype=torch.bfloat16):
        similarity = head(text, video).similarity
    assert similarity.dtype == torch.float32
    assert torch.equal(similarity, expected)


def test_the_geometry_is_that_of_the_increments():
    text, video = random_features()
    head = random_head()
    increment = head(text, video, True).parts["increment"]
    t, v = text.sentence[:, None], video.frames.mean(1)[None]
    angle = lambda a, b: F.cosine_similarity(a, b, dim=-1).acos()  # noqa: E731
    expected = {
        "angle_to_gap": angle(increment, v - t),
        "angle_to_text": angle(increment, t),
        "increment_norm": increment.norm(dim=-1),
        "text_norm": t.norm(dim=-1).expand(N, M),
        "corrected_norm": (t + increment).norm(dim=-1),
        "text_to_video": (v - t).norm(dim=-1),
        "corrected_to_video": (t + increment - v).norm(dim=-1),
    }
    found = head.geometry(text, video)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-8)


# Regularization, from the equations


def random_increments():
    return torch.randn(N, M, D, generator=torch.Generator().manual_seed(4), dtype=torch.double)


@pytest.mark.parametrize("anchor", ["video", "text"])
@pytest.mark.parametrize("prior", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("normalize", [False, True])
def test_bottleneck_is_the_divergence_of_each_anchors_gaussian(anchor, prior, normalize):
    increment = random_increments()
    config = Bottleneck(anchor=anchor, prior=prior, normalize=normalize)
    used = F.normalize(increment, dim=-1) if normalize else increment
    groups = [used[:, j] for j in range(M)] if anchor == "video" else list(used)
    divergences = [
        kl_divergence(
            Independent(Normal(group.mean(0), group.std(0) + 1e-6), 1),
            Independent(Normal(torch.zeros_like(group[0]), prior * torch.ones_like(group[0])), 1),
        )
        for group in groups
    ]
    torch.testing.assert_close(relaxed_bottleneck(increment, config), torch.stack(divergences).mean())
    mean = dataclasses.replace(config, reduction="mean")
    torch.testing.assert_close(relaxed_bottleneck(increment, mean) * D, torch.stack(divergences).mean())


def bottleneck_gradient(form, dtype, order, config):
    """Gradient of an untrained psi, whose increments of one anchor differ by about 1e-5 at a length of 1."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(64, generator=generator)
    sentence = shared + 0.5 * torch.randn(8, 64, generator=generator)
    frames = shared.roll(7) + 0.5 * torch.randn(8, FRAMES, 64, generator=generator)
    text = TextFeatures(sentence, sentence[:, None], torch.ones(8, 1, dtype=torch.bool))[order].to(dtype)
    video = VideoFeatures(frames, torch.ones(8, FRAMES, dtype=torch.bool))[order].to(dtype)
    torch.manual_seed(0)
    head = GAREHead(64, W, FRAMES, GAREOptions(increment=gap())).to(dtype)
    head.required_form = FORMS[form]
    relaxed_bottleneck(head(text, video, True).parts["increment"], config).backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in head.parameters()])


@pytest.mark.parametrize("form", ["dense", "factorised"])
@pytest.mark.parametrize("options", [{}, {"anchor": "text"}, {"normalize": True}])
def test_increments_that_hardly_differ_give_the_gradient_of_float64(form, options):
    config, order = Bottleneck(**options), torch.arange(8)
    expected = bottleneck_gradient("dense", torch.double, order, config)
    for turned in (order, order.roll(4)):  # as two processes would gather them
        found = bottleneck_gradient(form, torch.float, turned, config)
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_norm_variance_stops_at_its_floor():
    increment = random_increments().requires_grad_()
    variances = [torch.stack([increment[i, j].norm() for j in range(M)]).var() for i in range(N)]
    variance = torch.stack(variances).mean().detach()
    above = norm_variance(increment, Variance(floor=2 * float(variance)))
    torch.testing.assert_close(above.detach(), -variance)
    below = norm_variance(increment, Variance(floor=0.5 * float(variance)))
    assert below == 0
    assert not torch.autograd.grad(below, increment)[0].any()
    assert norm_variance(increment / 100, Variance()) < 0  # the floor is 0.5 by default
    assert norm_variance(increment * 100, Variance()) == 0


def test_smooth_norm_variance_is_the_papers_log_sum_exp():
    increment = random_increments()
    rows = []
    for i in range(N):
        length = [float(increment[i, j].norm()) for j in range(M)]
        mean = sum(length) / M
        rows.append(math.log(1 + sum(math.exp(-((x - mean) ** 2)) for x in length) / M))
    found = norm_variance(increment, LogSumExp())
    assert float(found) == pytest.approx(sum(rows) / N)


@pytest.mark.parametrize("alpha", [2.0, 0.5, 5.0])
def test_directional_diversity_is_eq_11_and_its_orthogonal_variant(alpha):
    increment = random_increments()
    logs, squares = [], []
    for i in range(N):
        z = [F.normalize(increment[i, j], dim=0) for j in range(M)]
        cosine = [[float(a @ b) for b in z] for a in z]
        mean = sum(math.exp(-alpha * (1 - x)) for row in cosine for x in row) / M**2
        logs.append(math.log(mean + 1e-8))
        squares.append(sum(cosine[j][k] ** 2 for j in range(M) for k in range(M) if j != k) / M**2)
    found = directional_diversity(increment, LogMeanExp(alpha=alpha))
    assert float(found) == pytest.approx(sum(logs) / N)
    found = directional_diversity(increment, Orthogonal())
    assert float(found) == pytest.approx(sum(squares) / N)


@pytest.mark.parametrize("increment", [torch.ones(3, 4, 6), torch.zeros(3, 4, 6)])
def test_equal_increments_have_finite_gradients(increment):
    increment.requires_grad_()
    terms = [norm_variance(increment, Variance()), directional_diversity(increment, LogMeanExp())]
    terms += [relaxed_bottleneck(increment, Bottleneck(anchor=anchor)) for anchor in ("video", "text")]
    sum(terms).backward()
    assert increment.grad.isfinite().all()


def test_directions_that_agree_cost_most():
    same = torch.ones(2, 3, D)
    assert float(directional_diversity(same, LogMeanExp())) == pytest.approx(0, abs=1e-6)
    assert float(directional_diversity(torch.eye(3, D).expand(2, 3, D), Orthogonal())) == 0
    assert directional_diversity(same, Orthogonal()) > 0.6


# The trust region


def anchor_loss(increments, sentence, videos, tau=0.1):
    """L_0 of Eq. 4: the loss of text 0 as a function of its increments (M, D)."""
    return -(F.cosine_similarity(sentence + increments, videos, dim=-1) / tau).log_softmax(0)[0]


def test_gradient_of_an_increment_is_eq_8():
    tau, increments = 0.1, random_increments()[0].requires_grad_()
    sentence, videos = random_increments()[1, 0], random_increments()[2]
    (gradient,) = torch.autograd.grad(anchor_loss(increments, sentence, videos), increments)
    corrected = (sentence + increments).detach()
    cosine = F.cosine_similarity(corrected, videos, dim=-1)
    weight = (cosine / tau).softmax(0) - torch.eye(M, dtype=torch.double)[0]
    length, squared = corrected.norm(dim=-1, keepdim=True), corrected.square().sum(-1, keepdim=True)
    basis = videos / (length * videos.norm(dim=-1, keepdim=True)) - cosine[:, None] * corrected / squared
    torch.testing.assert_close(gradient, weight[:, None] / tau * basis)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_trust_region_step_is_the_longest_descent_within_the_radius(share):
    radius = 2.5
    increments = (share * radius * F.normalize(random_increments()[0], dim=-1)).requires_grad_()
    sentence, videos = random_increments()[1, 0], random_increments()[2]
    (gradient,) = torch.autograd.grad(anchor_loss(increments, sentence, videos), increments)
    increments = increments.detach()
    alpha = trust_region_step(increments, gradient, radius)
    direction = F.normalize(gradient, dim=-1)
    moved = increments - alpha[:, None] * direction
    # Eq. 39 at equality, and any longer step leaves the region.
    squared = increments.square().sum(-1)
    along = (increments * direction).sum(-1)
    torch.testing.assert_close(alpha**2 - 2 * alpha * along + squared, torch.full_like(alpha, radius**2))
    torch.testing.assert_close(moved.norm(dim=-1), torch.full_like(alpha, radius))
    further = increments - 1.01 * (alpha[:, None] + 1e-3) * direction
    assert (further.norm(dim=-1) > radius).all()
    if share < 1:
        assert (alpha > 0).all()
        assert ((moved - increments) * gradient).sum() < 0  # the linearized loss of Eq. 36 falls
    if share == 0:  # Eq. 34
        torch.testing.assert_close(moved, -radius * direction)


# What bad input gets


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"increment": gap(sign=0)}, "GapIncrement.sign is 0; it must be one of 1, -1"),
        ({"increment": gap(context="patches")}, "context is patches; it must be one of frames, words"),
        ({"increment": gap(dropout=1.0)}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"increment": NoIncrement(), "direction": LogMeanExp(alpha=1.0)}, "increment is NoIncrement"),
        ({"pooling": TextPooling(0.0)}, "TextPooling.temperature is 0.0; it must be above 0"),
        ({"pooling": "mean"}, "GAREOptions.pooling is mean; it must be a Pooling"),
        ({"temporal_layers": -1}, "temporal_layers is -1; it must be at least 0"),
        ({"fixed_temperature": 0.001}, "fixed_temperature is 0.001; it must be at least 0.01"),
    ],
)
def test_conflicting_options_are_refused_at_construction(switches, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        random_head(**switches)


def test_draws_per_video_are_refused_where_they_do_not_apply():
    for kind in (GapIncrement, TextIncrement):
        with pytest.raises(ValueError, match="dropout_per is video, but dropout is 0"):
            kind(dropout=0.0, dropout_per="video")
    with pytest.raises(ValueError, match="context: words, psi mixes words"):
        GapIncrement(context="words", dropout_per="video")
    with pytest.raises(ValueError, match="dropout_per is text; it must be one of pair, video"):
        random_head(increment=GapIncrement(dropout_per="text"))


def test_a_bottleneck_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"Bottleneck\.weight is -1\.0; it must be at least 0"):
        Bottleneck(weight=-1.0)
    with pytest.raises(ValueError, match=r"Bottleneck\.prior is 0\.0; it must be above 0"):
        Bottleneck(prior=0.0)


def test_wanting_what_is_not_there_is_an_error():
    text, video = random_features()
    shorter = VideoFeatures(video.frames[:, :2], video.frame_mask[:, :2])
    with pytest.raises(ValueError, match="and 3 frames, but got"):
        random_head(increment=TextIncrement(dropout=0.0))(text, shorter)


# The module


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=2, vision_layers=1)


def module(encoder, **options):
    torch.manual_seed(0)
    return GARE(encoder, words=W, frames=FRAMES, gare=GAREOptions(**{"temporal_layers": 1} | options))


def pairs(method, count=M):
    torch.manual_seed(1)
    text = TextFeatures(torch.randn(count, 64), torch.randn(count, W, 64), torch.ones(count, W, dtype=torch.bool))
    video = VideoFeatures(torch.randn(count, FRAMES, 64), torch.ones(count, FRAMES, dtype=torch.bool))
    index = torch.arange(count)
    return PairedFeatures(method.encode_text(text), method.encode_video(video), index, index)


def test_losses_are_infonce_and_the_weighted_regularization(encoder):
    method = module(encoder, increment=gap())
    batch = pairs(method)
    scores = method.head(batch.text, batch.video, True)
    increment = scores.parts["increment"]
    terms = method.losses(batch)
    torch.testing.assert_close(terms["info_nce"], info_nce(method.temperature() * scores.similarity))
    torch.testing.assert_close(terms["bottleneck"], 1e-4 * relaxed_bottleneck(increment, Bottleneck()))
    torch.testing.assert_close(terms["norm_variance"], 0.01 * norm_variance(increment, Variance()))
    torch.testing.assert_close(terms["direction"], 0.01 * directional_diversity(increment, LogMeanExp()))


@pytest.mark.parametrize("kept", ["bottleneck", "norm_variance", "direction", None])
def test_terms_of_weight_zero_are_left_out(encoder, kept):
    off = {
        "bottleneck": Bottleneck(weight=0.0),
        "norm_variance": Variance(weight=0.0),
        "direction": LogMeanExp(weight=0.0),
    }
    off.pop(kept, None)
    method = module(encoder, **off)
    assert set(method.losses(pairs(method))) == {"info_nce", *([kept] if kept else [])}
    baseline = module(encoder, increment=NoIncrement())
    assert set(baseline.losses(pairs(baseline))) == {"info_nce"}


def test_a_single_pair_trains_infonce_alone_and_says_so(encoder):
    method = module(encoder)
    with pytest.warns(UserWarning, match="a batch of one pair has no variance"):
        assert set(method.losses(pairs(method, 1))) == {"info_nce"}


def test_what_biases_logits_reaches_infonce(encoder):
    method = module(encoder, increment=gap())
    batch = pairs(method)
    plain = method.losses(batch)["info_nce"]
    method.contrast.forward = lambda logits, temperature: 0 * logits
    biased = method.losses(batch)["info_nce"]
    assert biased.item() == pytest.approx(math.log(M))
    assert not torch.allclose(plain, biased)


def test_a_fixed_temperature_is_not_learnt(encoder):
    method = module(encoder, fixed_temperature=0.02)
    assert float(method.temperature()) == pytest.approx(50, rel=1e-5)
    assert not method.temperature.logit_scale.requires_grad
    assert module(encoder).temperature.logit_scale.requires_grad


def test_temporal_layers_start_from_the_text_transformer_and_can_be_left_out(encoder):
    method = module(encoder, temporal_layers=2)
    start = encoder.temporal_initialization(2)
    for block, source in zip(method.temporal.resblocks, start.blocks, strict=True):
        assert all(torch.equal(value, source[name]) for name, value in block.state_dict().items())
    video = VideoFeatures(torch.randn(M, FRAMES, 64), torch.ones(M, FRAMES, dtype=torch.bool))
    assert torch.equal(module(encoder, temporal_layers=0).encode_video(video).frames, video.frames)
    assert not torch.allclose(method.encode_video(video).frames, video.frames)


@pytest.mark.parametrize("context", ["frames", "words"])
def test_compact_texts_score_alike(encoder, context):
    method = module(encoder, increment=GapIncrement(context=context)).eval()
    batch = pairs(method)
    compact = method.compact_text(batch.text)
    assert compact.words.shape[1] == (W if context == "words" else 0)
    torch.testing.assert_close(
        method.score(compact, batch.video).similarity, method.score(batch.text, batch.video).similarity
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"increment": gap(context="words", corrected="video")},
        {"increment": TextIncrement()},
        {"temporal_layers": 0, "pooling": MeanPooling(), "fixed_temperature": 0.01},
        {"increment": NoIncrement()},
    ],
)
def test_every_parameter_of_the_method_gets_a_gradient(encoder, options):
    method = module(encoder, **options).train()
    sum(method.losses(pairs(method)).values()).backward()
    own = {name: p for name, p in method.named_parameters() if not name.startswith("encoder.") and p.requires_grad}
    missing = [name for name, p in own.items() if p.grad is None]
    assert not missing
    assert all(p.grad.isfinite().all() for p in own.values())


@pytest.mark.parametrize("options", [{}, {"increment": GapIncrement(context="words", corrected="video")}])
def test_ten_steps_with_dropout_lower_the_loss(encoder, options):
    method = module(encoder, **options).train()
    optimizer = torch.optim.Adam([*method.head.parameters(), *method.temporal.parameters()], lr=2e-3)
    text, video = pairs(method, 8).text, pairs(module(encoder, temporal_layers=0), 8).video
    history = []
    for _ in range(11):
        batch = PairedFeatures(text, method.encode_video(video), torch.arange(8), torch.arange(8))
        loss = sum(method.losses(batch).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.7 * history[0]


# Recipes


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("gare")
    synthesize("msrvtt", root, 20, 0, workers=1, progress=False)
    return root


def recipe(root, *names):
    paths = [RECIPES / f"{name}.yaml" for name in ("gare", *names, "fixture")]
    return from_recipe(paths, [f"--data.init_args.root={root}", "--data.init_args.num_workers=0"])


def test_the_recipe_is_the_released_method(tiny_root):
    method, _ = recipe(tiny_root)
    assert method.options == GAREOptions()
    assert len(method.temporal.resblocks) == 4
    assert method.encoder.text_mask
    written = yaml.safe_load((RECIPES / "gare.yaml").read_text(encoding="utf-8"))
    assert written["data"]["init_args"]["augmentation"] == "rand-augment"


def test_overlays_change_what_their_headers_say(tiny_root):
    method, _ = recipe(tiny_root, "gare-activitynet")
    assert method.options.increment == GapIncrement(corrected="video", context="words", dropout=0.3)
    assert method.optimizer_config.schedule_epochs == 5
    assert recipe(tiny_root, "gare-msvd")[0].temporal is None
    assert recipe(tiny_root, "gare-didemo")[0].options == recipe(tiny_root)[0].options
    method, data = recipe(tiny_root, "variants/gare-paper")
    assert method.options.pooling == MeanPooling()
    assert method.options.bottleneck == Bottleneck(weight=0.07, reduction="mean")
    assert float(method.temperature()) == pytest.approx(100)
    assert data.augmentation == "none"
    assert recipe(tiny_root, "variants/two-stage")[0].evaluation_config.normalization.candidates == 256


def test_a_run_with_two_stages_reports_the_recall_of_its_candidates(tiny_root, tmp_path, capsys):
    configs = [f"--config={RECIPES / name}" for name in ("gare.yaml", "fixture.yaml", "variants/two-stage.yaml")]
    options = [f"--data.init_args.root={tiny_root}", f"--results.directory={tmp_path}", "--trainer.max_epochs=1"]
    options += ["--trainer.limit_train_batches=1", "--trainer.check_val_every_n_epoch=1", "--trainer.accelerator=cpu"]
    options += ["--data.init_args.num_workers=0", "--data.init_args.batch_size=4", "--data.init_args.frames=3"]
    options += ["--model.init_args.encoder.init_args.width=64", "--trainer.log_every_n_steps=1"]
    options += ["--model.init_args.evaluation.normalization.init_args.candidates=2"]
    assert main(["fit", *configs, *options]) == 0
    (path,) = tmp_path.glob("*/*/results.json")
    results = json.loads(path.read_text())
    assert results["post_processing"] == "two stages (2 candidates)"
    assert not results["transductive"]
    recall = results["measured"]["recall of the 2 candidates, text-to-video"]
    assert 0 <= recall <= 100
    assert f"Recall of the 2 candidates, text-to-video: {recall:.1f} %" in capsys.readouterr().out


@pytest.mark.slow
def test_the_recipe_learns_the_synthetic_dataset(tmp_path):
    synthesize("msrvtt", tmp_path / "fixture", 500, 0, workers=2, progress=False)
    configs = [f"--config={RECIPES / name}" for name in ("gare.yaml", "fixture.yaml", "variants/two-stage.yaml")]
    options = [f"--data.init_args.root={tmp_path / 'fixture'}", f"--results.directory={tmp_path / 'runs'}"]
    # RandAugment changes the colours that the fixture's captions name.
    more = ["--trainer.accelerator=cpu", "--data.init_args.num_workers=2", "--data.init_args.augmentation=none"]
    more.append("--model.init_args.evaluation.normalization.init_args.candidates=20")
    assert main(["fit", *configs, *options, *more]) == 0
    (path,) = (tmp_path / "runs").glob("*/*/results.json")
    results = json.loads(path.read_text())
    chance = 100 / results["videos"]
    print(f"text-to-video R@1 {results['text_to_video']['R@1']:.1f} %, chance {chance:.1f} %, {results['measured']}")
    assert results["text_to_video"]["R@1"] >= 15 * chance
    assert results["measured"]["recall of the 20 candidates, text-to-video"] >= results["text_to_video"]["R@10"]
