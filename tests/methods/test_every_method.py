"""Variants of all methods: independence of pairs, both forms, blocks, training, checkpoints, recipes and learning."""

import dataclasses
from operator import attrgetter
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from methods.parts import FORMS, RECIPES, WORDS, build, captioned, close, descend, encoder, features, paired, run

from tvr_lightning.audit.experiments import audit_scores
from tvr_lightning.layers.aggregation import ISA, MeanAggregation, SoftmaxAggregation
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.layers.stochastic import Normal
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods import DRL, GAID, GARE, TCMGC, TMASS, XCLIP, CLIP4Clip, UCoFiA, XPool
from tvr_lightning.methods.clip4clip import TightTransf
from tvr_lightning.methods.dpdv.method import DPDV
from tvr_lightning.methods.dpdv.options import AveragePatches, Divergence, DPDVOptions, EveryPatch, PatchMerging
from tvr_lightning.methods.dpdv.options import SelectedPatches as Selected
from tvr_lightning.methods.drl import ChannelDecorrelation, DotProduct, NoDecorrelation, TokenWise, WeightedTokenWise
from tvr_lightning.methods.gaid.options import DASP, STP, GAIDOptions, GatedFusion, NoFusion, NoPerturbation
from tvr_lightning.methods.gare.options import (
    Bottleneck,
    GapIncrement,
    GAREOptions,
    MeanPooling,
    NoIncrement,
    TextIncrement,
)
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention
from tvr_lightning.methods.xclip import AOSM
from tvr_lightning.methods.xpool import XPoolOptions
from tvr_lightning.testing import method_recipes
from tvr_lightning.testing.contract import filled
from tvr_lightning.testing.processes import quiet_trainer

SINGLE, WITHOUT_MEANS = ("sentence_frame", "frame_word"), {"attention": None, "temporal_layers": 0}
VARIANTS = {
    CLIP4Clip: [{"similarity_header": kind} for kind in (MeanP(), SeqLSTM(2), SeqTransf(1), TightTransf(1))],
    XCLIP: [
        {"similarity_header": SeqTransf(2)},
        *({"similarity_header": MeanP(), mask: True} for mask in ("mask_words", "mask_frames")),
        {
            "similarity_header": MeanP(), "similarity_aggregation": MeanAggregation(),
            "mask_words": True, "mask_frames": True,
        },
        {
            "similarity_header": SeqLSTM(2), "contrasts": ("frame_word", "video_word"),
            "similarity_aggregation": AOSM(50.0), "mask_words": True, "mask_frames": True,
        },
    ],
    DRL: [
        {"temporal_encoder": SeqTransf(2)},
        {
            "interaction": WeightedTokenWise("exclude", 3), "temporal_encoder": SeqTransf(1),
            "decorrelation": ChannelDecorrelation("random", 0.5),
        },
        {
            "interaction": TokenWise("exclude"), "temporal_encoder": SeqLSTM(),
            "decorrelation": ChannelDecorrelation("matched"),
        },
        {"interaction": DotProduct(), "temporal_encoder": SeqTransf(1), "decorrelation": NoDecorrelation()},
    ],
    XPool: [{}, {"heads": 4, "dropout": 0.0}],
    TMASS: [{}, {"radius": "scalar"}, {"prior": Normal(), "trials": "mean"}],
    TCMGC: [
        {"temporal_layers": 1},
        {"attention": LanguageVideoAttention(heads=2, dropout=0.3, projections=True)},
        {"attention": LanguageVideoAttention(dropout=0.3, residual=False), "temporal_layers": 0},
        {"contrasts": ("video_sentence", "frame_word"), "aggregation": "mean", "mask_words": True, "mask_frames": True},
        {"attention": None, "similarity_aggregation": SoftmaxAggregation(), "mask_frames": True},
        {**WITHOUT_MEANS, "contrasts": SINGLE, "decorrelation": Decorrelation(weight=0.2)},
    ],
    UCoFiA: [
        {"temporal_layers": 1},
        {"temporal_layers": 0, "scores": ("video_sentence", "word_patch"), "patch_matrix": False},
        {"similarity_aggregation": SoftmaxAggregation(), "patch_selection": PatchSelection(predictor="eval-t2v")},
        {"similarity_aggregation": ISA(10.0), "patch_selection": PatchSelection(samples=10)},
    ],
    GARE: [
        {"temporal_layers": 1},
        {"increment": GapIncrement(context="words", corrected="video"), "temporal_layers": 1},
        {"increment": GapIncrement(dropout=0.3), "temporal_layers": 1},
        {"increment": TextIncrement(dropout=0.3), "mask_frames": True},
        {"temporal_layers": 0, "increment": TextIncrement(), "pooling": MeanPooling(), "fixed_temperature": 0.01},
        {"increment": NoIncrement()},
        {"mask_frames": True, "temporal_layers": 0},
        {"mask_frames": True, "increment": GapIncrement(context="words"), "temporal_layers": 0},
    ],
    GAID: [
        *({"fusion": GatedFusion(level)} for level in ("sample", "frame", "token")),
        {"fusion": GatedFusion("token", "none"), "perturbation": STP(Normal(0.5), trials=3), "normalize_text": True},
        {"fusion": GatedFusion(text="paired"), "attention": XPoolOptions(4, 0.1)},
        {"fusion": NoFusion(), "perturbation": DASP(support_weight=0.0), "loss_weighting": "uniform"},
        {"perturbation": NoPerturbation()},
    ],
    DPDV: [
        {},
        {"macro_interaction": "weighted-max", "temporal_layers": 1},
        {"macro_interaction": "mean", "micro_interaction": "mean", "patch_reduction": EveryPatch()},
        {
            "spot_partition": "pairwise", "macro_interaction": "ucofia", "micro_interaction": "ucofia",
            "patch_reduction": AveragePatches(),
        },
        {"patch_reduction": Selected(PatchSelection(kept=2, samples=10)), "recover_captions": 2},
        {"patch_reduction": PatchMerging(stages=1), "divergence": Divergence(scores="cosines")},
    ],
}  # fmt: skip
CASES = [pytest.param(k, o, id=f"{k.__name__} {o}"[:80]) for k, variants in VARIANTS.items() for o in variants]
every_variant = pytest.mark.parametrize(("kind", "options"), CASES)
LAST_CASES = [(kind, variants[-1]) for kind, variants in VARIANTS.items()]
WITHOUT_HEADS = 3
"""Number of variants, the first, without a head that scores in blocks."""


def batch(method, items=6, dtype=torch.double):
    """Features of matching pairs: frames and audio resemble their texts."""
    text, video = features(items, items, patches=9, dtype=dtype)
    video.frames, video.audio = video.frames + text.sentence[:, None], video.audio + text.sentence[:, None]
    extras = {"captions": captioned(items, 3, dtype=dtype)} if isinstance(method, DPDV) else {}
    return paired(text, video, **extras)


def loss_of(method, pairs):
    """The loss of pairs before the method's own layers, with the same draws each time."""
    torch.manual_seed(0)
    own = paired(method.encode_text(pairs.text), method.encode_video(pairs.video), **pairs.extras)
    return torch.stack(list(method.losses(own).values())).sum()


def trained(method):
    """The parameters of a method's own layers."""
    own = method.named_parameters()
    return {name: p for name, p in own if p.requires_grad and not name.startswith(("encoder.", "audio_"))}


@every_variant
@torch.no_grad()
def test_a_score_depends_only_on_its_own_text_and_video(kind, options):
    method = build(kind, options).eval()
    pairs = batch(method, 5)
    text, video = method.encode_text(pairs.text), method.encode_video(pairs.video)
    scores = method.score(text, video).similarity
    noisy = dataclasses.replace(pairs.text, words=filled(pairs.text.words, pairs.text.word_mask))
    other = pairs.video.apply(lambda tensor: filled(tensor, pairs.video.frame_mask))
    for part, texts, videos in (("words", noisy, pairs.video), ("frames", pairs.text, other)):
        if part not in method.reads_padding:
            found = method.score(method.encode_text(texts), method.encode_video(videos)).similarity
            torch.testing.assert_close(found, scores)
    assert scores.std() > 1e-4
    texts, videos = [3, 1], [2, 0, 3]
    torch.testing.assert_close(method.score(text[texts], video[videos]).similarity, scores[texts][:, videos])
    assert not audit_scores(text, video, torch.arange(5), score=method.score).leaks
    compact = method.compact_text(text), method.compact_video(video)
    torch.testing.assert_close(method.score(*compact).similarity, scores)


@pytest.mark.parametrize(("kind", "options"), CASES[WITHOUT_HEADS:])
def test_every_parameter_is_trained_equally_in_both_forms_and_in_blocks_of_any_size(kind, options):
    method = build(kind, options)
    pairs, parameters = batch(method, 3), [*trained(method).values()]
    # Dropout is the same in both forms, but not in blocks.
    one_pair = {"pair_numbers": lambda text, video: 2**20, "memory_gib": 2.0**-6}
    for training, change in ((True, {"required_form": FORMS["dense"]}), (False, one_pair)):
        found = []
        for changed in ({"required_form": None}, change):
            for head in [part for part in method.train(training).modules() if isinstance(part, PairHead)]:
                vars(head).update(changed)
            loss = loss_of(method, pairs)
            # In training, every parameter needs a gradient. In evaluation, patches are selected without one.
            found.append([loss, *torch.autograd.grad(loss, parameters, materialize_grads=not training)])
        close(*found, rtol=1e-6, atol=1e-9)


@every_variant
def test_a_video_without_frames_and_a_text_without_words_score_and_train(kind, options):
    method = build(kind, options)
    pairs = batch(method, 3)
    pairs.video.frame_mask[0] = False
    pairs.text.word_mask[1] = False
    gradients = torch.autograd.grad(loss_of(method, pairs), [*trained(method).values()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert method.score(method.encode_text(pairs.text), method.encode_video(pairs.video)).similarity.isfinite().all()


@pytest.mark.parametrize(("kind", "options"), [*CASES[:WITHOUT_HEADS], *LAST_CASES])
def test_ten_steps_lower_the_loss(kind, options):
    method = build(kind, options, torch.float32).train()
    pairs = batch(method, dtype=torch.float32)
    losses = descend(lambda: loss_of(method, pairs), trained(method))
    assert losses[-1] < 0.8 * losses[0], losses


XPOOL_OPTIONS = [{"prior": Normal()}, {"prior": Normal(0.1)}, {"trials": 3}, {"trials": "mean"}, {"radius": "scalar"}]
CHANGES = {
    CLIP4Clip: [{"similarity_header": header} for header in (SeqLSTM(2), SeqTransf(1), TightTransf(1))],
    XPool: [{"heads": 4}],
    TMASS: [*XPOOL_OPTIONS, {"attention": XPoolOptions(heads=4)}],
    UCoFiA: [
        {"temporal_layers": 0},
        {"scores": ("video_sentence", "word_patch")},
        {"scores": ("video_sentence",)},
        *({"similarity_aggregation": kind} for kind in (SoftmaxAggregation(), MeanAggregation(), ISA(10.0))),
        {"patch_matrix": False},
        {"patch_selection": PatchSelection(predictor="eval-t2v")},
    ],
}


@pytest.mark.parametrize(("kind", "options"), [(kind, options) for kind in CHANGES for options in CHANGES[kind]])
def test_every_option_changes_the_scores_and_leaves_no_parameter_untrained(kind, options):
    usual, other = (build(kind, given, torch.float32).eval() for given in ({}, options))
    sizes = {name: tensor.shape for name, tensor in other.state_dict().items()}
    shared = {name: tensor for name, tensor in usual.state_dict().items() if tensor.shape == sizes.get(name)}
    other.load_state_dict(shared, strict=False)
    pairs = batch(other, dtype=torch.float32)
    scores = [made.score(pairs.text, made.encode_video(pairs.video)).similarity for made in (usual, other)]
    assert not torch.allclose(*scores, atol=1e-5)
    loss_of(other.train(), pairs).backward()
    assert not [name for name, parameter in trained(other).items() if parameter.grad is None]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CLIP4Clip, lambda rate: {"similarity_header": TightTransf(1)}),  # of a fixed rate
        (XPool, lambda rate: {"dropout": rate}),
        (TCMGC, lambda rate: {"attention": LanguageVideoAttention(dropout=rate)}),
        (GARE, lambda rate: {"increment": GapIncrement(dropout=rate)}),
        (GARE, lambda rate: {"increment": TextIncrement(dropout=rate)}),
    ],
)
@torch.no_grad()
def test_dropout_is_used_only_in_training(kind, options):
    method, without = (build(kind, options(rate), torch.float32).eval() for rate in (0.5, 0.0))
    expected = without.score(*features()).similarity
    torch.testing.assert_close(method.score(*features()).similarity, expected)
    assert not torch.allclose(method.train().score(*features()).similarity, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "options"), [(TMASS, {}), *((GAID, {"perturbation": kind}) for kind in (NoPerturbation(), STP(), DASP()))]
)
def test_the_audit_detects_the_leak_of_the_released_protocol(kind, options):
    method, (text, video) = build(kind, options, torch.float32).eval(), features(5, 5)
    video.frame_mask[3::4] = True  # a single frame needs no pooling
    clean, leaking = method.score(text, video).similarity, method.score_as_released(text, video, text).similarity
    own = torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(leaking[own], clean[own], rtol=1e-4, atol=1e-6)
    assert ((leaking - clean).abs()[~own] > 1e-5).all()
    assert audit_scores(text, video, torch.arange(5), score_as_released=method.score_as_released).leaks


@pytest.mark.parametrize("kind", [GARE, TCMGC, UCoFiA, DPDV])
def test_temporal_layers_start_from_the_text_transformer_and_can_be_left_out(kind):
    method, without = (build(kind, {"temporal_layers": layers}, torch.float32).eval() for layers in (2, 0))
    start = encoder().temporal_initialization(2)
    for block, source in zip(method.temporal.resblocks, start.blocks, strict=True):
        assert all(torch.equal(value, source[name]) for name, value in block.state_dict().items())
    _, video = features(patches=9)
    assert without.temporal is None
    assert torch.equal(without.encode_video(video).frames, video.frames)
    assert not torch.allclose(method.encode_video(video).frames, video.frames)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        *((kind, {}, 0) for kind in (CLIP4Clip, GAID, GARE, TMASS, XPool)),
        (GARE, {"increment": GapIncrement(context="words")}, WORDS),
        (XCLIP, {}, WORDS),
    ],
)
def test_banks_keep_the_words_only_for_methods_that_use_them(kind, options, words):
    assert build(kind, options, torch.float32).compact_text(features()[0]).words.shape[1] == words


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("dpdv", {"method.options": DPDVOptions()}),
        ("dpdv variants/dpdv-paper", {"method.options": DPDVOptions(patch_reduction=PatchMerging(heads=1))}),
        ("gare", {"method.options": GAREOptions(), "method.encoder.text_mask": True}),
        ("gare variants/gare-paper", {
            "method.options.pooling": MeanPooling(), "method.options.fixed_temperature": 0.01,
            "method.options.bottleneck": Bottleneck(weight=0.07, reduction="mean"),
        }),
        ("gaid", {
            "method.options": GAIDOptions(), "method.protocol": "query", "data.sampling": "container-segments",
            "data.audio.kind": "whisper", "data.audio.align": "duration",
            "data.audio.seconds": 30,
        }),
        ("gaid variants/gaid-as-released", {
            "method.protocol": "as-released", "method.options.fusion": GatedFusion(text="paired"),
            "method.gather": "none", "data.audio.align": "clip30",
        }),
        ("gaid data/vatex gaid-vatex", {
            "method.options.perturbation": DASP(support_weight=0.4), "method.options.attention.dropout": 0.4,
        }),
    ],
)  # fmt: skip
def test_recipes_have_the_default_options_and_overlays_change_them(recipe, synthetic, names, expected):
    root = {"root": synthetic("vatex", 8)} if "vatex" in names else {}
    method, data = recipe(*names.split(), **root)
    built = SimpleNamespace(method=method, data=data)
    assert {name: attrgetter(name)(built) for name in expected} == expected


METHOD_RECIPES = method_recipes(RECIPES).values()
CANDIDATES = "--model.init_args.evaluation.normalization.init_args.candidates=20"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipes", "options"),
    [
        # `learned` trains clip4clip, and tests of their own train the others.
        *((path.stem, ()) for path in METHOD_RECIPES if path.stem not in ("clip4clip", "gare", "ncl")),
        ("gare variants/two-stage", (CANDIDATES,)),
    ],
)
def test_a_recipe_learns_the_synthetic_dataset(fixture_root, learned, tmp_path, capsys, recipes, options):
    first, *overlays = recipes.split()
    folder, results = run("fit", [first, "fixture", *overlays], fixture_root, tmp_path, *learned, *options)
    losses = pd.read_csv(folder / "metrics.csv")["train/loss"].dropna()
    assert losses.iloc[-1] < losses.iloc[0]
    assert results["text_to_video"]["R@1"] >= 15 * 100 / results["videos"]
    if overlays:
        assert results["post_processing"] == "two stages (20 candidates)"
        recall = results["measured"]["recall of the 20 candidates, text-to-video"]
        assert results["text_to_video"]["R@10"] <= recall <= 100
        assert f"Recall of the 20 candidates, text-to-video: {recall:.1f} %" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "options"), LAST_CASES)
def test_a_method_built_in_python_can_be_loaded_from_its_checkpoint(tmp_path, kind, options):
    method = build(kind, options, torch.float32)
    trainer = quiet_trainer()
    trainer.strategy.connect(method)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "last.ckpt", encoder=encoder(), weights_only=True)
    assert loaded.options == method.options
    assert loaded.state_dict().keys() == method.state_dict().keys()
    close(loaded.state_dict().values(), method.state_dict().values(), rtol=0, atol=0)
