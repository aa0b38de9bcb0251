"""DPDV against the paper's equations, its switches, its captions, and what reaches the score at test."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from parity.case import load_case
from parity.check import check_case

from tvr_lightning.audit.experiments import audit_scores
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.data.batch import Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.methods.dpdv.method import DPDV, nonempty
from tvr_lightning.methods.dpdv.model import (
    Captions,
    DPDVHead,
    caption_order,
    recover_frames,
    spot_frames,
    view_divergence,
)
from tvr_lightning.methods.dpdv.options import (
    AveragePatches,
    Divergence,
    DPDVOptions,
    EveryPatch,
    PatchMerging,
    SelectedPatches,
)
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.losses import info_nce
from tvr_lightning.training.options import plain_options

RECIPES = Path(__file__).parents[2] / "recipes"
B, F, P, W, S, D = 5, 6, 9, 7, 4, 64
NO_DIVERGENCE = {"divergence": Divergence(weight=0.0)}
TABLES = {
    "3 R1": {"paths": (), **NO_DIVERGENCE, "macro_interaction": "mean", "micro_interaction": "mean"},
    "3 R2": {"paths": ("spot",), "macro_interaction": "mean", "micro_interaction": "mean"},
    "3 R3": {"paths": ("recover",), "macro_interaction": "mean", "micro_interaction": "mean"},
    "3 R4": {"macro_interaction": "mean", "micro_interaction": "mean"},
    "4 R2": {"views": ("macro",)},
    "4 R3": {"views": ("micro",)},
    "4 R4": {},
    "5 macro mean": {"views": ("macro",), "macro_interaction": "mean"},
    "5 macro UCoFiA": {"views": ("macro",), "macro_interaction": "ucofia"},
    "5 micro mean": {"views": ("micro",), "micro_interaction": "mean", "patch_reduction": EveryPatch()},
    "5 micro UCoFiA": {"views": ("micro",), "micro_interaction": "ucofia", "patch_reduction": SelectedPatches()},
    "6 R1": {"original_loss": False, **NO_DIVERGENCE},
    "6 R2": NO_DIVERGENCE,
    "6 R3": {"original_loss": False},
    "S6 4-8": {"spot_ratio": 1 / 3},
    "S6 8-4": {"spot_ratio": 2 / 3},
    "S8 2": {"recover_captions": 2},
    "S8 3": {"recover_captions": 3},
    "S10 CLIP4Clip": {"patch_reduction": AveragePatches()},
    "S10 UCoFiA": {"patch_reduction": SelectedPatches()},
    "S10 .75": {"patch_reduction": PatchMerging(ratio=0.75)},
    "S10 .25": {"patch_reduction": PatchMerging(ratio=0.0625)},
    "pairwise": {"spot_partition": "pairwise"},
    "pairwise with UCoFiA": {
        "spot_partition": "pairwise",
        "macro_interaction": "ucofia",
        "micro_interaction": "ucofia",
        "patch_reduction": AveragePatches(),
    },
    "eq5": {"macro_interaction": "weighted-max"},
    "temporal": {"temporal_layers": 1},
}


@functools.cache
def encoder():
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, patch_size=8, text_layers=1, vision_layers=1, context_length=20)


def module(memory_gib=2.0, **options):
    shared = encoder()
    torch.manual_seed(0)
    evaluation = EvaluationConfig(memory_gib=memory_gib)
    made = DPDV(shared, dpdv=DPDVOptions(captions=S, **options), words=W, frames=F, evaluation=evaluation)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.head.parameters():  # as trained: fresh weights are all alike
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made


def features(patches=P, seed=0, items=B):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    def lengths(*shape, most):
        return torch.arange(most) < torch.randint(2, most + 1, (*shape, 1), generator=generator)

    text = TextFeatures(draw(items, D), draw(items, W, D), lengths(items, most=W))
    video = VideoFeatures(draw(items, F, D), lengths(items, most=F), draw(items, F, patches, D))
    captions = Captions(
        draw(items, S, D), draw(items, S, W, D), lengths(items, S, most=W), torch.ones(items, S, dtype=torch.bool)
    )
    return text, video, captions


def pairs(made, patches=P, seed=0):
    text, video, captions = features(patches, seed)
    index = torch.arange(len(text))
    return PairedFeatures(text, made.encode_video(video), index, index, {"captions": captions})


def test_the_equations_hold(parity_cases):
    comparisons = check_case(load_case(parity_cases / "dpdv.safetensors"))
    assert len(comparisons) == 89
    assert comparisons[0].relative < 1e-9, comparisons[0]


# Partition


def test_the_spot_path_has_the_most_similar_half_of_the_frames_that_are_there():
    generator = torch.Generator().manual_seed(0)
    for length in range(2, 13):
        mask = torch.arange(12) < length
        similarity = torch.randn(12, generator=generator)
        spot = spot_frames(similarity, mask, 0.5)
        assert int(spot.sum()) == min((length + 1) // 2, length - 1)
        assert not (spot & ~mask).any()
        rest = recover_frames(spot, mask)
        assert torch.equal(rest, mask & ~spot)
        assert similarity[spot].min() > similarity[rest].max()


@pytest.mark.parametrize(
    ("ratio", "kept"), [(1 / 3, 4), (0.5, 6), (2 / 3, 8), (0.66666667, 8), (0.3333, 4), (0.99, 11), (0.01, 1)]
)
def test_both_paths_have_frames_at_every_ratio(ratio, kept):
    assert int(spot_frames(torch.rand(12), torch.ones(12, dtype=torch.bool), ratio).sum()) == kept


def test_equal_frames_go_by_time_and_a_single_frame_is_in_both_paths():
    mask = torch.tensor([[True] * 4, [True, False, False, False], [False] * 4])
    spot = spot_frames(torch.zeros(3, 4), mask, 0.5)
    assert spot.tolist() == [[True, True, False, False], [True, False, False, False], [False] * 4]
    assert recover_frames(spot, mask).tolist() == [[False, False, True, True], [True, False, False, False], [False] * 4]


def test_captions_are_ranked_by_the_mean_of_the_recovered_frames_and_absent_ones_come_last():
    _, video, captions = features()
    mask = captions.mask.clone()
    mask[:, 1] = False
    recover = torch.zeros(B, F, dtype=torch.bool)
    recover[:, 1:3] = True
    cosine, order = caption_order(captions.sentence, mask, video.frames, recover)
    mean = video.frames[:, 1:3].mean(1)
    expected = (unit(captions.sentence) * unit(mean).unsqueeze(1)).sum(-1)
    torch.testing.assert_close(cosine, expected)
    assert (order[:, -1] == 1).all()
    assert (order[:, 0] == expected.masked_fill(~mask, -2).argmax(1)).all()


def test_a_pairwise_partition_agrees_with_the_paired_one_on_matching_pairs():
    paired, pairwise = module(), module(spot_partition="pairwise")
    some = pairs(paired)
    ours, theirs = (made.head.matching(some.text, some.video, some.extras["captions"]) for made in (paired, pairwise))
    for name in ours:
        torch.testing.assert_close(ours[name].diagonal(), theirs[name].diagonal())
    for view in ("macro", "micro"):
        assert torch.equal(ours[view], theirs[view])
        assert not torch.allclose(ours[f"spot.{view}"], theirs[f"spot.{view}"], atol=1e-4)


# Losses


def test_losses_are_eq_12():
    made = module()
    some = pairs(made)
    terms, parts = made.losses(some), made.head.matching(some.text, some.video, some.extras["captions"])
    scale = made.temperature()
    assert set(terms) == {"macro", "micro", "spot", "recover", "divergence"}
    for view in ("macro", "micro"):
        torch.testing.assert_close(terms[view], info_nce(scale * parts[view]))
    for path in ("spot", "recover"):
        contrast = info_nce(scale * parts[f"{path}.macro"]) + info_nce(scale * parts[f"{path}.micro"])
        torch.testing.assert_close(terms[path], 0.5 * contrast)
    total = 0
    for path in ("spot", "recover"):
        for view in ("macro", "micro"):
            for logits, other in (
                (scale * parts[view], scale * parts[f"{path}.{view}"]),
                (scale * parts[view].T, scale * parts[f"{path}.{view}"].T),
            ):
                probability = logits.softmax(1)
                total += (probability * (probability.log() - other.softmax(1).log())).sum(1).mean() / 2
    torch.testing.assert_close(terms["divergence"], 0.1 * total)


@pytest.mark.parametrize("name", TABLES)
def test_every_ablation_trains_and_scores_within_reach_of_a_cosine(name):
    made = module(**TABLES[name]).train()
    some = pairs(made, patches=16)
    terms = made.losses(some)
    torch.stack(list(terms.values())).sum().backward()
    # DDP waits for every parameter: none may be left without a gradient.
    unused = [n for n, p in made.named_parameters() if p.grad is None and not n.startswith("encoder.")]
    assert not unused
    scores = made.eval().score(some.text, some.video)
    assert set(scores.parts) == set(made.options.views)
    assert bool((scores.similarity.abs() <= 1 + 1e-5).all())
    torch.testing.assert_close(scores.similarity, torch.stack(list(scores.parts.values())).mean(0))


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"path_weight": 0.2}, {"spot", "recover"}),
        ({"divergence": Divergence(weight=0.3)}, {"divergence"}),
        ({"divergence": Divergence(scores="cosines")}, {"divergence"}),
        ({"divergence": Divergence(reduction="mean")}, {"divergence"}),
        ({"divergence": Divergence(direction="path-to-original")}, {"divergence"}),
        ({"spot_ratio": 0.3}, {"spot", "recover", "divergence"}),
        ({"spot_partition": "pairwise"}, {"spot", "recover", "divergence"}),
        ({"macro_interaction": "weighted-max"}, {"macro", "spot", "recover", "divergence"}),
        ({"macro_interaction": "mean"}, {"macro", "spot", "recover", "divergence"}),
        ({"micro_interaction": "mean"}, {"micro", "spot", "recover", "divergence"}),
        ({"patch_reduction": EveryPatch()}, {"micro", "spot", "recover", "divergence"}),
    ],
)
def test_a_switch_changes_the_terms_that_it_should(options, changed):
    plain, other = module(), module(**options)
    if "micro_interaction" not in options and "macro_interaction" not in options:
        other.load_state_dict(plain.state_dict(), strict=False)
    else:
        shared = {n: p for n, p in plain.state_dict().items() if n in other.state_dict()}
        other.load_state_dict(shared, strict=False)
    ours, theirs = plain.losses(pairs(plain)), other.losses(pairs(other))
    found = {name for name in ours if not torch.allclose(ours[name], theirs[name], rtol=1e-5)}
    assert found == changed


def test_divergence_vanishes_where_a_path_agrees_and_teaches_one_side_in_the_reverse():
    original = torch.randn(4, 4, requires_grad=True)
    path = torch.randn(4, 4, requires_grad=True)
    scale = torch.tensor(20.0)
    for value in view_divergence(original, original.clone(), scale, Divergence()):
        torch.testing.assert_close(value, torch.tensor(0.0))
    torch.stack(view_divergence(original, path, scale, Divergence())).sum().backward()
    assert path.grad is not None
    assert original.grad is not None
    original.grad = path.grad = None
    reverse = Divergence(direction="path-to-original")
    torch.stack(view_divergence(original, path, scale, reverse)).sum().backward()
    assert path.grad is None
    assert bool((original.grad != 0).all())


def test_ten_steps_reduce_the_loss():
    made = module().train()
    trained = [p for name, p in made.named_parameters() if not name.startswith("encoder.")]
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    history = []
    for _ in range(10):
        loss = torch.stack(list(made.losses(pairs(made)).values())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.8 * history[0], history


# What reaches the score


def test_nothing_of_the_captions_reaches_the_score():
    made = module().eval()
    some = pairs(made)
    before = made.score(some.text, some.video).similarity
    made.losses(some)
    _, _, strangers = features(seed=9)
    other = dataclasses.replace(some, extras={"captions": strangers})
    assert made.losses(other)["recover"] != made.losses(some)["recover"]
    assert torch.equal(made.score(other.text, other.video).similarity, before)
    batch = PairBatch(TextBatch(["a red circle"], torch.tensor([0])), videos(1), {"recover_captions": [["a"] * 2]})
    captioned = made.pair_features(batch)
    batch.extras = {"recover_captions": [["something else entirely"] * 3]}
    assert torch.equal(made.pair_features(batch).video.patches, captioned.video.patches)
    assert torch.equal(made.pair_features(batch).text.words, captioned.text.words)


def test_captions_that_are_not_chosen_play_no_part():
    made = module()
    some = pairs(made)
    captions = some.extras["captions"]
    _, recover = made.head.partition(some.text, some.video)
    _, order = caption_order(captions.sentence, captions.mask, some.video.frames, recover)
    rows = torch.arange(B)
    words = captions.words.clone()
    words[rows, order[:, 1]] = 5.0
    other = dataclasses.replace(some, extras={"captions": dataclasses.replace(captions, words=words)})
    assert torch.equal(made.losses(some)["recover"], made.losses(other)["recover"])
    words[rows, order[:, 0]] = 5.0
    other = dataclasses.replace(some, extras={"captions": dataclasses.replace(captions, words=words)})
    assert not torch.equal(made.losses(some)["recover"], made.losses(other)["recover"])


@pytest.mark.parametrize("name", ["4 R4", "eq5", "3 R4", "pairwise with UCoFiA"])
def test_the_audit_finds_no_leak(name):
    made = module(**TABLES[name]).eval()
    text, video, _ = features(items=8)
    audit = audit_scores(text, made.encode_video(video), torch.arange(8), score=made.score)
    assert not [finding for finding in audit.findings if finding.leaks]


@pytest.mark.parametrize("partition", ["paired", "pairwise"])
def test_blocks_give_what_one_piece_gives_with_the_same_gradient(partition):
    options = {"spot_partition": partition, "patch_reduction": EveryPatch()}
    whole, blocked = module(**options), module(**options, memory_gib=2 / 1024)
    text, video, captions = features(patches=40, items=16)
    made = {}
    for name, one in (("whole", whole), ("blocked", blocked)):
        encoded = one.encode_video(video)
        terms = one.losses(PairedFeatures(text, encoded, torch.arange(16), torch.arange(16), {"captions": captions}))
        torch.stack(list(terms.values())).sum().backward()
        made[name] = terms
    pair_bytes = 4 * blocked.head.pair_numbers(*blocked.head.prepare(text, encoded))
    assert pair_bytes * 16 * 16 > blocked.head.block_bytes(torch.device("cpu")) == 2**20  # more than one block
    for name in made["whole"]:
        torch.testing.assert_close(made["whole"][name], made["blocked"][name])
    for (name, ours), theirs in zip(whole.named_parameters(), blocked.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_padding_plays_no_part():
    made = module()
    text, video, captions = features()
    noisy = dataclasses.replace(
        video,
        frames=video.frames.masked_fill(~video.frame_mask.unsqueeze(-1), 7.0),
        patches=video.patches.masked_fill(~video.frame_mask[:, :, None, None], -7.0),
    )
    padded = dataclasses.replace(text, words=text.words.masked_fill(~text.word_mask.unsqueeze(-1), 3.0))
    index = torch.arange(B)
    ours = made.losses(PairedFeatures(text, made.encode_video(video), index, index, {"captions": captions}))
    theirs = made.losses(PairedFeatures(padded, made.encode_video(noisy), index, index, {"captions": captions}))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


@torch.no_grad()
def test_mean_pooling_is_the_mean_over_frames_and_patches_that_are_there():
    made = module(views=("micro",), micro_interaction="mean", patch_reduction=AveragePatches()).eval()
    text, video, _ = features()
    words = (text.words * text.word_mask.unsqueeze(-1)).sum(1) / text.word_mask.sum(1, keepdim=True)
    mask = video.frame_mask[:, :, None, None]
    patches = (video.patches * mask).sum((1, 2)) / (mask.sum((1, 2)) * P)
    expected = unit(words) @ unit(patches).T
    torch.testing.assert_close(made.score(text, made.encode_video(video)).similarity, expected)


@pytest.mark.parametrize(("patches", "left"), [(49, 7), (196, 25), (1, 1)])
def test_patches_are_merged_once_per_video(patches, left):
    made = module().eval()
    _, video, _ = features(patches=patches, items=2)
    assert made.encode_video(video).patches.shape == (2, F, left, D)


def test_identical_frames_and_patches_have_a_defined_score():
    made = module()
    text, video, captions = features()
    flat = dataclasses.replace(video, frames=torch.ones(B, F, D), patches=torch.ones(B, F, P, D))
    terms = made.losses(
        PairedFeatures(text, made.encode_video(flat), torch.arange(B), torch.arange(B), {"captions": captions})
    )
    assert all(bool(term.isfinite()) for term in terms.values())


# Captions


def videos(count):
    pixels = torch.zeros(count, F, 3, 32, 32, dtype=torch.uint8)
    media = Media(pixels, torch.ones(count, F, dtype=torch.bool))
    return VideoBatch(media, torch.arange(count), [f"video{i}" for i in range(count)])


def test_captions_are_encoded_as_the_texts_are():
    made = module().eval()
    said = [["a red circle", "  ", "a blue box"], ["a star moves up"]]
    batch = PairBatch(TextBatch(["x", "y"], torch.arange(2)), videos(2), {"recover_captions": said})
    captions = made.encode_extras(batch)["captions"]
    assert captions.mask.tolist() == [[True, True, False, False], [True, False, False, False]]
    alone = made.encoder.encode_text(["a blue box"], W)
    torch.testing.assert_close(captions.sentence[0, 1], alone.sentence[0])
    torch.testing.assert_close(captions.words[0, 1], alone.words[0])
    assert torch.equal(captions.word_mask[0, 1], alone.word_mask[0])
    assert module(paths=("spot",)).encode_extras(batch) == {}


def test_lacking_captions_are_named():
    batch = PairBatch(TextBatch(["x"], torch.arange(1)), videos(1))
    with pytest.raises(UserError, match=r"data\.init_args\.extra_captions"):
        module().encode_extras(batch)
    batch.extras = {"recover_captions": [["one", "", "two"]]}
    with pytest.raises(UserError, match="video0 has 2 descriptions, but the Recover-Path needs 3"):
        module(recover_captions=3).encode_extras(batch)
    with pytest.raises(UserError, match=r"video7 has 3 descriptions, more than model\.init_args\.dpdv\.captions 2"):
        nonempty("video7", ["a", "b", "c"], 2, 1)
    made = module()
    with pytest.raises(UserError, match="encode_extras"):
        made.losses(dataclasses.replace(pairs(made), extras={}))


def test_videos_may_have_fewer_captions_than_others():
    made = module(recover_captions=2)
    some = pairs(made)
    captions = some.extras["captions"]
    mask = captions.mask.clone()
    mask[0, 2:] = False
    noise = captions.words.masked_fill(~mask[:, :, None, None], 8.0)
    ours, theirs = (
        made.losses(
            dataclasses.replace(some, extras={"captions": dataclasses.replace(captions, mask=mask, words=words)})
        )
        for words in (captions.words, noise)
    )
    assert torch.equal(ours["recover"], theirs["recover"])


# Construction


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": ()}, "it must contain some of macro, micro, each once"),
        ({"paths": ("spot", "spot")}, "each once"),
        ({"spot_ratio": 1.0}, "above 0 and below 1"),
        ({"recover_captions": 5}, r"between 1 and captions \(4\)"),
        ({"path_weight": -1.0}, "path_weight is -1"),
        ({"paths": ()}, "Set divergence.weight to 0"),
        ({"paths": (), **NO_DIVERGENCE, "original_loss": False}, "no contrastive loss"),
        ({"paths": (), **NO_DIVERGENCE, "spot_partition": "pairwise"}, "paths is empty"),
        ({"path_weight": 0.0, **NO_DIVERGENCE}, r"Set paths to \[\]"),
        ({"path_weight": 0.0, "original_loss": False}, "no contrastive loss"),
        ({"paths": ("spot",), "recover_captions": 2}, "needs the path recover"),
        ({"recover_captions": 2, "macro_interaction": "ucofia"}, "Set recover_captions to 1"),
        ({"views": ("macro",), "patch_reduction": EveryPatch()}, "patch_reduction need the view micro"),
        ({"views": ("micro",), "macro_interaction": "mean"}, "needs the view macro"),
        ({"patch_reduction": PatchMerging(ratio=0.0)}, "ratio is 0.0"),
        ({"micro_interaction": "ucofia"}, "Use SelectedPatches"),
        ({"temporal_layers": -1}, "temporal_layers is -1"),
    ],
)
def test_conflicting_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        module(**options)


def test_one_frame_cannot_be_divided():
    with pytest.raises(ValueError, match="two paths need at least 2"):
        DPDV(encoder(), words=W, frames=1)
    DPDV(encoder(), dpdv=DPDVOptions(paths=(), **NO_DIVERGENCE), words=W, frames=1)
    with pytest.raises(ValueError, match=r"Divergence\.weight is -1"):
        Divergence(weight=-1)


def test_the_micro_view_asks_for_patches():
    assert module().needs_patches
    assert not module(views=("macro",)).needs_patches
    text, video, _ = features()
    with pytest.raises(ValueError, match="needs patches"):
        DPDVHead(D, W, F, DPDVOptions())(text, dataclasses.replace(video, patches=None))


def test_scores_are_in_float32_under_autocast():
    made = module().eval()
    some = pairs(made)
    half = some.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        scores = made.score(half.text, half.video).similarity
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, made.score(half.text.float(), half.video.float()).similarity)


# Recipes


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("dpdv")
    synthesize("msrvtt", root, 20, 0, workers=1, progress=False)

    def build(*overlays):
        paths = [RECIPES / "dpdv.yaml", *overlays, RECIPES / "fixture.yaml"]
        return from_recipe(paths, [f"--data.init_args.root={root}", "--data.init_args.num_workers=0"])[0].options

    return build


def test_the_recipe_is_the_paper(recipe):
    assert recipe() == DPDVOptions()


def test_overlays_change_what_their_headers_say(recipe):
    variants = RECIPES / "variants"
    assert recipe(variants / "dpdv-paper.yaml").patch_reduction == PatchMerging(heads=1)
    assert recipe(variants / "dpdv-spot.yaml").paths == ("spot",)
    assert recipe(variants / "dpdv-captions-3.yaml").recover_captions == 3


@pytest.mark.parametrize(
    "kind", [AveragePatches(), EveryPatch(), SelectedPatches(PatchSelection(kept=2)), PatchMerging(ratio=0.75)]
)
def test_a_kind_of_patches_takes_the_place_of_another(recipe, tmp_path, kind):
    written = {"class_path": type(kind).__name__, "init_args": plain_options(kind)["init_args"]}
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(json.dumps({"model": {"init_args": {"dpdv": {"patch_reduction": written}}}}))
    assert recipe(overlay).patch_reduction == kind


@pytest.mark.parametrize("kind", [AveragePatches(), SelectedPatches(PatchSelection(kept=2)), PatchMerging(stages=1)])
def test_a_method_built_in_python_is_loaded_from_its_checkpoint(tmp_path, kind):
    made = module(patch_reduction=kind, divergence=Divergence(scores="cosines"))
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.strategy.connect(made)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = DPDV.load_from_checkpoint(tmp_path / "last.ckpt", encoder=encoder(), weights_only=True)
    assert loaded.options == made.options
    some = pairs(made)
    found, expected = (one.eval().score(some.text, some.video).similarity for one in (loaded, made))
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_the_recipe_learns_the_fixture(tmp_path):
    synthesize("msrvtt", tmp_path / "fixture", 500, 0, workers=2, progress=False)
    configs = [f"--config={RECIPES / name}" for name in ("dpdv.yaml", "fixture.yaml")]
    options = [f"--data.init_args.root={tmp_path / 'fixture'}", f"--results.directory={tmp_path / 'runs'}"]
    assert main(["fit", *configs, *options, "--trainer.accelerator=cpu"]) == 0
    (path,) = (tmp_path / "runs").glob("*/*/results.json")
    results = json.loads(path.read_text())
    print(f"text-to-video R@1 {results['text_to_video']['R@1']:.1f} % of {results['videos']} videos")
    assert results["text_to_video"]["R@1"] >= 15 * 100 / results["videos"]
