"""TC-MGC against the authors' code, and both forms against each other over every switch."""

import dataclasses
import itertools
import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import ISA, MeanAggregation, SoftmaxAggregation
from tvr_lightning.methods.tcmgc.method import TCMGC
from tvr_lightning.methods.tcmgc.model import TCMGCHead, similarity_decorrelation
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, SlotReorganization, TCMGCOptions
from tvr_lightning.pairwise import DensePairVectors, PairVectors
from tvr_lightning.training.losses import info_nce

RELEASED = ["tcmgc", "tcmgc_lambda10"]
CONTRASTS = ("video_sentence", "video_word", "sentence_frame", "frame_word")
NAMES = {
    "global_matrix": "global_mat_weight",
    "local_matrix": "local_mat_weight",
    "lsa.weight": "logit_weight",
    "video_word_aggregation.weight": "attentive_word_logit_weight",
    "sentence_frame_aggregation.weight": "concat_frame_word_logit_weight",
    "frame_word_aggregation.words.weight": "attentive_word_mat_weight",
    "frame_word_aggregation.frames_after_words.weight": "attentive_frame_word_mat_weight2",
    "frame_word_aggregation.frames.weight": "attentive_frame_word_mat_weight",
    "frame_word_aggregation.words_after_frames.weight": "attentive_word_mat_weight2",
}


FORMS = {"factorised": PairVectors, "dense": DensePairVectors}


def released(parity_cases, name, form=None):
    """Head, features and expectations of a case of the authors' code."""
    path = parity_cases / f"{name}.safetensors"
    case = load_file(path)
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
    options = TCMGCOptions(
        keep_rate=config["keep_rate"],
        similarity_aggregation=ISA(config["softmax_lambda"]),
        decorrelation=Decorrelation(weight=config["sdr_weight"]),
        attention=LanguageVideoAttention(dropout=0.0),
    )
    head = TCMGCHead(64, words=12, frames=6, options=options)
    head.required_form = FORMS.get(form)
    prefix = "checkpoint.conditional_transformer.pool_frames."
    state = {ours: case[f"checkpoint.{theirs}"] for ours, theirs in NAMES.items()}
    state |= {f"attention.{name}": case[prefix + name] for name in head.attention.state_dict()}
    head.load_state_dict(state)
    text = TextFeatures(case["feature.sentence"], case["feature.words"], case["input.text_mask"].bool())
    video = VideoFeatures(case["feature.temporal_frames"], case["input.video_mask"].bool())
    return head.eval(), text, video, case["checkpoint.clip.logit_scale"].exp().squeeze(), case


@pytest.mark.parametrize("form", ["factorised", "dense"])
@pytest.mark.parametrize("name", RELEASED)
def test_scores_are_those_of_the_released_code(parity_cases, name, form):
    head, text, video, scale, case = released(parity_cases, name, form)
    with torch.no_grad():
        scores = head(text, video, scale)
    torch.testing.assert_close(scale * scores.similarity, case["expected.similarity"], rtol=1e-5, atol=2e-5)
    assert list(scores.parts) == list(CONTRASTS)
    for contrast, score in scores.parts.items():
        torch.testing.assert_close(scale * score, case[f"expected.score.{contrast}"], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["factorised", "dense"])
@pytest.mark.parametrize("name", RELEASED)
def test_conditioned_features_are_those_of_the_released_code(parity_cases, name, form):
    head, text, video, _, case = released(parity_cases, name, form)
    with torch.no_grad():
        coarse, fine = head.visual_vectors(*head.prepare(text, video))
    expected = torch.nn.functional.normalize(case["expected.sentence_conditioned_video"], dim=-1)
    torch.testing.assert_close(coarse.materialize()[:, :, 0], expected, rtol=1e-5, atol=1e-5)
    expected = torch.nn.functional.normalize(case["expected.word_conditioned_frames"], dim=-1)  # (N, W, M, D)
    torch.testing.assert_close(fine.materialize().transpose(1, 2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RELEASED)
def test_losses_are_those_of_the_released_code(parity_cases, name):
    head, text, video, scale, case = released(parity_cases, name)
    scores = head(text[:5], video[:5], scale)
    contrastive = info_nce(scale * scores.similarity)
    decorrelation = head.decorrelation(scores, scale)
    total = contrastive + head.options.decorrelation.weight * decorrelation
    for value, expected in ((contrastive, "info_nce"), (decorrelation, "sdr"), (total, "total")):
        torch.testing.assert_close(value, case[f"expected.loss.{expected}"].squeeze(), rtol=1e-5, atol=1e-6)


N, M, W, F, D = 5, 4, 10, 3, 16


def random_features(seed=0, dtype=torch.double):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    words = torch.arange(W) < torch.tensor([[10], [4], [2], [7], [3]])
    frames = torch.arange(F) < torch.tensor([[3], [1], [2], [3]])
    text = TextFeatures(normal(N, D), normal(N, W, D), words)
    return text, VideoFeatures(normal(M, F, D), frames, clip_frames=normal(M, F, D))


def random_head(seed=1, words=W, frames=F, form=None, **switches):
    """A head in double precision whose parameters are away from their start, without dropout unless asked for."""
    switches.setdefault("attention", LanguageVideoAttention(dropout=0.0))
    switches.setdefault("keep_rate", 0.4)
    torch.manual_seed(seed)
    head = TCMGCHead(D, words, frames, TCMGCOptions(**{"temporal_layers": 0} | switches)).double()
    head.required_form = FORMS.get(form)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return head


SCALE = torch.tensor(20.0, dtype=torch.double)
SUBSETS = [subset for size in range(1, 4) for subset in itertools.combinations(CONTRASTS, size)]
NO_DECORRELATION = Decorrelation(weight=0.0)
UNCONDITIONED = {"attention": None}
SWITCHES = {
    "defaults": {},
    "two heads": {"attention": LanguageVideoAttention(heads=2, dropout=0.0)},
    "four heads": {"attention": LanguageVideoAttention(heads=4, dropout=0.0)},
    "projections": {"attention": LanguageVideoAttention(dropout=0.0, projections=True)},
    "two heads with projections": {"attention": LanguageVideoAttention(heads=2, dropout=0.0, projections=True)},
    "no residual": {"attention": LanguageVideoAttention(dropout=0.0, residual=False)},
    "masked frames": {"mask_frames": True},
    "masked words": {"mask_words": True},
    "both masked": {"mask_frames": True, "mask_words": True, "similarity_aggregation": MeanAggregation()},
    "softmax slots": {"similarity_aggregation": SoftmaxAggregation()},
    "mean slots": {"similarity_aggregation": MeanAggregation()},
    "lambda": {"similarity_aggregation": ISA(1.0)},
    "softmax contrasts": {"aggregation": "softmax"},
    "mean contrasts": {"aggregation": "mean"},
    "softmax of cosines": {"aggregation": "softmax", "aggregation_on": "cosines"},
    "lsa of cosines": {"aggregation_on": "cosines"},
    "no interaction matrices": {"interaction_matrices": False},
    "keep rate": {"keep_rate": 0.7},
    "all off": {"reorganization": SlotReorganization("off", "off", "off", "off")},
    "words only": {"reorganization": SlotReorganization(frames="off")},
    "frames only": {"reorganization": SlotReorganization(words="off", frames="fusion")},
    "all fused": {"reorganization": SlotReorganization("fusion", "fusion", "fusion", "fusion")},
    "all removed": {"reorganization": SlotReorganization("removal", "removal", "removal", "removal")},
    "unconditioned": UNCONDITIONED,
    "unconditioned softmax": {**UNCONDITIONED, "similarity_aggregation": SoftmaxAggregation()},
    "unconditioned masked": {**UNCONDITIONED, "mask_frames": True, "mask_words": True},
    **{f"only {', '.join(s)}": {"contrasts": s, "decorrelation": NO_DECORRELATION} for s in SUBSETS},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_equal_in_both_forms_and_changes_something(name):
    text, video = random_features()
    results, grads = [], []
    for form in ("factorised", "dense"):
        head = random_head(form=form, **SWITCHES[name])
        assert head.form is (PairVectors if form == "factorised" else DensePairVectors)
        scores = head(text, video, SCALE)
        square = head(text[:M], video, SCALE)
        loss = info_nce(SCALE * square.similarity, reduction=head.options.loss_reduction)
        if len(scores.parts) > 1:
            loss = loss + head.decorrelation(square, SCALE)
        results.append(scores)
        grads.append(torch.autograd.grad(loss, list(head.parameters())))
    torch.testing.assert_close(results[0].similarity, results[1].similarity, rtol=1e-9, atol=1e-9)
    for fast, dense in zip(results[0].parts.values(), results[1].parts.values(), strict=True):
        assert fast.shape == (N, M)
        torch.testing.assert_close(fast, dense, rtol=1e-9, atol=1e-9)
    for fast, dense in zip(*grads, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, dense, rtol=1e-7, atol=1e-9)
    if name != "defaults":
        usual = random_head()(text, video, SCALE).similarity
        assert not torch.allclose(results[0].similarity, usual, atol=1e-6)


@pytest.mark.parametrize("name", ["defaults", "both masked", "unconditioned", "two heads"])
def test_permuted_texts_and_videos_permute_the_scores(name):
    text, video = random_features()
    rows, columns = torch.randperm(N), torch.randperm(M)
    head = random_head(**SWITCHES[name])
    scores, permuted = head(text, video, SCALE), head(text[rows], video[columns], SCALE)
    torch.testing.assert_close(permuted.similarity, scores.similarity[rows][:, columns])
    alone = head(text[2:3], video[1:2], SCALE)
    torch.testing.assert_close(alone.similarity, scores.similarity[2:3, 1:2])


def test_order_of_words_does_not_matter_but_order_of_frames_is_for_the_temporal_encoder():
    text, video = random_features()
    head = random_head()
    order = torch.randperm(W)
    shuffled = dataclasses.replace(text, words=text.words[:, order])
    expected = head(text, video, SCALE).similarity
    torch.testing.assert_close(head(shuffled, video, SCALE).similarity, expected)
    video = dataclasses.replace(video, frames=video.frames.flip(1))
    torch.testing.assert_close(head(text, video, SCALE).similarity, expected)


@pytest.mark.parametrize("form", ["factorised", "dense"])
@pytest.mark.parametrize("switches", [{}, {**UNCONDITIONED, "mask_frames": True}, {"mask_frames": True}])
def test_masked_padding_says_nothing(form, switches):
    text, video = random_features()
    head = random_head(mask_words=True, form=form, **switches)
    noise, _ = random_features(seed=9)
    other = dataclasses.replace(text, words=torch.where(text.word_mask.unsqueeze(-1), text.words, noise.words))
    scores = head(text, video, SCALE)
    torch.testing.assert_close(head(other, video, SCALE).similarity, scores.similarity)
    if switches:
        mask = video.frame_mask.unsqueeze(-1)
        other = dataclasses.replace(video, frames=video.frames * mask, clip_frames=video.clip_frames * mask + ~mask)
        torch.testing.assert_close(head(text, other, SCALE).similarity, scores.similarity)
    grads = torch.autograd.grad(scores.similarity.sum(), list(head.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


def test_video_without_frames_scores_and_trains():
    text, video = random_features()
    video.frame_mask[0] = False
    for switches in ({"mask_frames": True}, {}, {**UNCONDITIONED}):
        head = random_head(**switches)
        scores = head(text, video, SCALE)
        scores.similarity.sum().backward()
        assert scores.similarity.isfinite().all()
        assert all(p.grad.isfinite().all() for p in head.parameters())


def test_a_small_budget_changes_nothing():
    text, video = random_features()
    whole, blocks = random_head(), random_head()
    blocks.memory_gib = 8 * 8 * blocks.pair_numbers(text, video) / 2**30  # four pairs per block
    grads = []
    for head in (whole, blocks):
        similarity = head(text, video, SCALE).similarity
        grads.append((similarity, *torch.autograd.grad(similarity.square().sum(), list(head.parameters()))))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("per", ["pair", "video"])
@pytest.mark.parametrize("options", [{}, {"heads": 2, "projections": True}, {"residual": False}])
def test_dropout_draws_alike_in_both_forms_and_only_in_training(per, options):
    text, video = random_features()
    trained = []
    for form in FORMS:
        attention = LanguageVideoAttention(dropout=0.3, dropout_per=per, **options)
        head = random_head(form=form, attention=attention).train()
        torch.manual_seed(0)
        first = head(text, video, SCALE).similarity
        trained.append((first, *torch.autograd.grad(first.square().sum(), list(head.parameters()))))
        assert not torch.allclose(first, head(text, video, SCALE).similarity)
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)
    head.eval()
    without = random_head(attention=LanguageVideoAttention(dropout=0.0, **options)).eval()
    torch.testing.assert_close(head(text, video, SCALE).similarity, without(text, video, SCALE).similarity)
    assert random_head(attention=LanguageVideoAttention(dropout=0.3)).train().form is PairVectors


def test_auto_takes_the_dense_form_where_the_basis_would_be_as_wide_as_the_vectors():
    wide = LanguageVideoAttention(heads=8, dropout=0.0)
    assert random_head(attention=wide).form is DensePairVectors
    assert random_head(attention=LanguageVideoAttention(heads=4, dropout=0.0)).form is PairVectors


def test_half_precision_features_are_scored_in_float32():
    text, video = random_features(dtype=torch.float32)
    head = random_head().float()
    expected = head(text.to(torch.bfloat16).float(), video.to(torch.bfloat16).float(), SCALE.float()).similarity
    with torch.autocast("cpu", dtype=torch.bfloat16):
        similarity = head(text.to(torch.bfloat16), video.to(torch.bfloat16), SCALE.float()).similarity
    assert similarity.dtype == torch.float32
    assert torch.equal(similarity, expected)


# Parameter counts: Tables 5 to 8 and Figure B.1, W = 32


def counted(keep_rate, *modes):
    options = TCMGCOptions(keep_rate=keep_rate, reorganization=SlotReorganization(*modes))
    head = TCMGCHead(8, words=32, frames=12, options=options)
    return {
        "video_word": sum(p.numel() for p in head.video_word_aggregation.parameters()),
        "sentence_frame": sum(p.numel() for p in head.sentence_frame_aggregation.parameters()),
        "frame_word": sum(p.numel() for p in head.frame_word_aggregation.parameters()),
    }


@pytest.mark.parametrize("step", range(9))
def test_parameters_of_isa_are_those_of_the_papers_tables(parity_cases, step):
    case = load_file(parity_cases / "tcmgc_switches.safetensors")
    rate = (step + 1) / 10
    k = int(case["expected.parameter_count.k(W=32,keep_rate=.1...9)"][step])
    total = sum(counted(rate, "removal", "fusion", "removal", "removal").values())
    assert total == 5 * k**2 + (k + 1) ** 2
    assert total == int(case["expected.parameter_count.default(removal, fusion, removal+removal)"][step])
    for mode in ("off", "removal", "fusion"):
        expected = int(case[f"expected.parameter_count.vector.{mode}"][step])
        assert counted(rate, mode, mode)["video_word"] == expected
        assert counted(rate, mode, mode)["sentence_frame"] == expected
        for other in ("off", "removal", "fusion"):
            expected = int(case[f"expected.parameter_count.frame_word.words_{mode}.frames_{other}"][step])
            assert counted(rate, "removal", "fusion", mode, other)["frame_word"] == expected


def test_contrasts_that_are_not_made_leave_no_parameters():
    head = random_head(contrasts=("sentence_frame",), decorrelation=NO_DECORRELATION, aggregation="mean")
    names = {name.split(".")[0] for name, _ in head.named_parameters()}
    assert names == {"attention", "sentence_frame_aggregation"}


# Aggregation of the contrasts and losses, from the equations


@pytest.mark.parametrize("file", ["tcmgc_switches", "tcmgc_switches_lambda_10"])
def test_aggregation_of_contrasts_matches_the_equations(parity_cases, file):
    case = load_file(parity_cases / f"{file}.safetensors")
    scores = case["input.scores(text,video,granularity)"].double().permute(2, 0, 1)
    scale = case["input.logit_scale"].double().exp().squeeze()
    keys = [key for key in case if key.startswith("expected.aggregate.")]
    assert len(keys) == 34
    for key in keys:
        _, _, kind, on, subset = key.split(".")
        chosen = [int(number) - 1 for number in subset.split(",")]
        head = random_head(
            contrasts=tuple(CONTRASTS[i] for i in chosen),
            aggregation=kind,
            aggregation_on=on,
            decorrelation=NO_DECORRELATION,
        )
        if kind == "lsa":
            head.lsa.weight.data = case[f"checkpoint.lsa.{subset}"].double()
        made = scale * head.aggregate(scores[chosen], scale)
        torch.testing.assert_close(made, case[key], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("file", ["tcmgc_switches", "tcmgc_switches_lambda_10"])
def test_losses_match_the_equations(parity_cases, file):
    case = load_file(parity_cases / f"{file}.safetensors")
    scores = case["input.scores(text,video,granularity)"].double().permute(2, 0, 1)
    scale = case["input.logit_scale"].double().exp().squeeze()
    parts = Scores(scores[0], dict(zip(CONTRASTS, scores, strict=True)))
    for pairs, on, estimator in itertools.product(
        ("positives", "negatives", "all"), ("logits", "cosines"), ("biased", "unbiased")
    ):
        head = random_head(decorrelation=Decorrelation(0.5, pairs, on, estimator == "unbiased"))
        expected = case[f"expected.loss.sdr.{pairs}.{on}.{estimator}"].squeeze()
        torch.testing.assert_close(head.decorrelation(parts, scale), expected, rtol=1e-9, atol=1e-12)
    assert float(similarity_decorrelation(scores[:1].expand(4, -1, -1))) == 0


# What bad input gets


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"keep_rate": 0.05}, "keep_rate 0.05 keeps 0 of 10 slots of reorganization.video_word"),
        ({"keep_rate": 1.5}, "keep_rate is 1.5; it must be above 0 and at most 1"),
        ({"keep_rate": 1.0}, "reorganization.sentence_frame: fusion has nothing to fuse"),
        ({"contrasts": ("video_word",)}, "decorrelation needs two contrasts, since the variance of video_word alone"),
        ({"contrasts": ()}, "it must contain some of video_sentence, video_word"),
        ({"contrasts": ("video_word", "video_word")}, "each once"),
        ({"contrasts": ("video_word", "patch_word")}, "it must be one of video_sentence, video_word"),
        ({"similarity_aggregation": ISA(0.0)}, "ISA.softmax_lambda is 0.0; it must be above 0"),
        ({"temporal_layers": -1}, "temporal_layers is -1"),
        ({"attention": LanguageVideoAttention(heads=3)}, "heads is 3; it must divide the dimension 16"),
    ],
)
def test_conflicting_options_are_refused_at_construction(switches, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        random_head(**switches)


def test_parts_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"dropout is 1\.0; it must be at least 0 and below 1"):
        LanguageVideoAttention(dropout=1.0)
    with pytest.raises(ValueError, match="dropout_per is video, but dropout is 0"):
        LanguageVideoAttention(dropout=0.0, dropout_per="video")
    with pytest.raises(ValueError, match=r"Decorrelation\.weight is -1\.0"):
        Decorrelation(weight=-1.0)
    with pytest.raises(ValueError, match=r"SlotReorganization\.words is none"):
        SlotReorganization(words="none")


def test_features_that_do_not_fit_the_matrices_are_refused():
    text, video = random_features()
    with pytest.raises(ValueError, match="built for 8 words and 3 frames"):
        random_head(words=8)(text, video, SCALE)
    with pytest.raises(ValueError, match="got 10 words and 3 frames"):
        random_head(frames=6)(text, video, SCALE)
    with pytest.raises(ValueError, match="clip_frames is missing"):
        random_head(**UNCONDITIONED)(text, dataclasses.replace(video, clip_frames=None), SCALE)


# The module


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=2, vision_layers=1)


def module(encoder, **options):
    torch.manual_seed(0)
    options = TCMGCOptions(**{"keep_rate": 0.4, "temporal_layers": 1} | options)
    return TCMGC(encoder, words=W, frames=F, tcmgc=options)


def pairs(method):
    torch.manual_seed(1)
    text = TextFeatures(torch.randn(M, 64), torch.randn(M, W, 64), torch.ones(M, W, dtype=torch.bool))
    video = VideoFeatures(torch.randn(M, F, 64), torch.ones(M, F, dtype=torch.bool))
    return PairedFeatures(method.encode_text(text), method.encode_video(video), torch.arange(M), torch.arange(M))


def test_losses_are_infonce_of_the_logits_and_weighted_decorrelation(encoder):
    method = module(encoder, attention=LanguageVideoAttention(dropout=0.0))
    batch = pairs(method)
    terms = method.losses(batch)
    scores, scale = method.score(batch.text, batch.video), method.temperature()
    torch.testing.assert_close(terms["info_nce"], info_nce(scale * scores.similarity))
    logits = scale * torch.stack(list(scores.parts.values()))
    torch.testing.assert_close(terms["decorrelation"], 0.5 * logits.var(0).diagonal().mean())
    summed = module(encoder, attention=LanguageVideoAttention(dropout=0.0), loss_reduction="sum").losses(batch)
    torch.testing.assert_close(summed["info_nce"], 2 * terms["info_nce"])
    off = module(encoder, decorrelation=Decorrelation(weight=0.0)).losses(batch)
    assert set(off) == {"info_nce"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": LanguageVideoAttention(dropout=0.0, projections=True)},
        {"temporal_layers": 0},
        {"contrasts": ["video_sentence", "frame_word"], "aggregation": "mean"},
        {"attention": None, "similarity_aggregation": SoftmaxAggregation(), "mask_frames": True},
        {"attention": None, "temporal_layers": 0, "contrasts": ["sentence_frame", "frame_word"]},
    ],
)
def test_every_parameter_of_the_method_gets_a_gradient(encoder, options):
    method = module(encoder, **options).train()
    sum(method.losses(pairs(method)).values()).backward()
    own = {name: p for name, p in method.named_parameters() if not name.startswith("encoder.")}
    missing = [name for name, p in own.items() if p.grad is None]
    assert not missing
    assert all(p.grad.isfinite().all() for p in own.values())


def test_temporal_layers_start_from_the_text_transformer_and_can_be_left_out(encoder):
    method = module(encoder, temporal_layers=2)
    start = encoder.temporal_initialization(2)
    for block, source in zip(method.temporal.resblocks, start.blocks, strict=True):
        assert all(torch.equal(value, source[name]) for name, value in block.state_dict().items())
    video = VideoFeatures(torch.randn(M, F, 64), torch.ones(M, F, dtype=torch.bool))
    without = module(encoder, temporal_layers=0)
    assert without.temporal is None
    assert torch.equal(without.encode_video(video).frames, video.frames)
    assert not torch.allclose(method.encode_video(video).frames, video.frames)
    with pytest.raises(ValueError, match="nothing would use the temporal encoder"):
        module(encoder, attention=None, contrasts=["sentence_frame", "frame_word"])


def test_frames_before_the_temporal_encoder_are_kept_where_they_are_contrasted(encoder):
    video = VideoFeatures(torch.randn(M, F, 64), torch.ones(M, F, dtype=torch.bool))
    assert module(encoder).encode_video(video).clip_frames is None
    kept = module(encoder, attention=None).encode_video(video)
    assert torch.equal(kept.clip_frames, video.frames)
    assert not torch.allclose(kept.frames, video.frames)


def test_training_with_dropout_lowers_the_loss(encoder):
    method = module(encoder, attention=LanguageVideoAttention(dropout=0.3)).train()
    method.head.memory_gib = 2**-9
    optimizer = torch.optim.Adam([*method.head.parameters(), *method.temporal.parameters()], lr=2e-3)
    batch = pairs(method).detach()
    history = []
    for _ in range(15):
        loss = sum(method.losses(batch).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.7 * history[0]


def test_decorrelation_lowers_the_variance_it_penalises():
    text, video = random_features()
    text, variances = text[:M], {}
    for weight in (0.0, 0.5):
        head = random_head(decorrelation=Decorrelation(weight=weight))
        optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
        for _ in range(30):
            scores = head(text, video, SCALE)
            loss = info_nce(SCALE * scores.similarity) + weight * head.decorrelation(scores, SCALE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        variances[weight] = float(head.decorrelation(head(text, video, SCALE), SCALE).detach())
    assert variances[0.5] < 0.5 * variances[0.0]
