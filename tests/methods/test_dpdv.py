"""DPDV against the paper's equations, its switches, its captions, and what reaches the score at test."""

import dataclasses

import pytest
import torch
from methods.parts import encoder, moved, paired
from parity.case import load_case
from parity.check import check_case

from tvr_lightning.data.batch import Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.dpdv.method import DPDV, nonempty
from tvr_lightning.methods.dpdv.model import Captions, caption_order, recover_frames, spot_frames, view_divergence
from tvr_lightning.methods.dpdv.options import (
    AveragePatches,
    Divergence,
    DPDVOptions,
    EveryPatch,
    PatchMerging,
    SelectedPatches,
)
from tvr_lightning.training.losses import info_nce

B, F, P, W, S, D = 5, 6, 9, 7, 4, 64
NO_DIVERGENCE = {"divergence": Divergence(weight=0.0)}
MEANS = {"macro_interaction": "mean", "micro_interaction": "mean"}
TABLES = {
    "3 R1": {"paths": (), **NO_DIVERGENCE, **MEANS},
    "3 R2": {"paths": ("spot",), **MEANS},
    "3 R3": {"paths": ("recover",), **MEANS},
    "3 R4": MEANS,
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
}


def module(**options):
    torch.manual_seed(0)
    made = DPDV(encoder(), dpdv=DPDVOptions(captions=S, **options), words=W, frames=F)
    moved(made.head)
    return made


def features(patches=P, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    def lengths(*shape, most):
        return torch.arange(most) < torch.randint(2, most + 1, (*shape, 1), generator=generator)

    text = TextFeatures(draw(B, D), draw(B, W, D), lengths(B, most=W))
    video = VideoFeatures(draw(B, F, D), lengths(B, most=F), draw(B, F, patches, D))
    there = torch.ones(B, S, dtype=torch.bool)
    return text, video, Captions(draw(B, S, D), draw(B, S, W, D), lengths(B, S, most=W), there)


def pairs(made, patches=P, text=None, video=None, **captions):
    """Pairs whose text, video and fields of captions may be given."""
    own_text, own_video, own_captions = features(patches)
    encoded = made.encode_video(video or own_video)
    return paired(text or own_text, encoded, captions=dataclasses.replace(own_captions, **captions))


def matching(made, some):
    return made.head.matching(some.text, some.video, some.extras["captions"])


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
    expected = (unit(captions.sentence) * unit(video.frames[:, 1:3].mean(1)).unsqueeze(1)).sum(-1)
    torch.testing.assert_close(cosine, expected)
    assert (order[:, -1] == 1).all()
    assert (order[:, 0] == expected.masked_fill(~mask, -2).argmax(1)).all()


def test_a_pairwise_partition_agrees_with_the_paired_one_on_matching_pairs():
    paired_one, pairwise = module(), module(spot_partition="pairwise")
    some = pairs(paired_one)
    ours, theirs = matching(paired_one, some), matching(pairwise, some)
    for name in ours:
        torch.testing.assert_close(ours[name].diagonal(), theirs[name].diagonal())
    for view in ("macro", "micro"):
        assert torch.equal(ours[view], theirs[view])
        assert not torch.allclose(ours[f"spot.{view}"], theirs[f"spot.{view}"], atol=1e-4)


# Losses


def test_losses_are_eq_12():
    made = module()
    some = pairs(made)
    terms, parts, scale = made.losses(some), matching(made, some), made.temperature()
    expected, divergence = {view: info_nce(scale * parts[view]) for view in ("macro", "micro")}, 0
    for path in ("spot", "recover"):
        expected[path] = 0.5 * sum(info_nce(scale * parts[f"{path}.{view}"]) for view in ("macro", "micro"))
        for view in ("macro", "micro"):
            logits, other = scale * parts[view], scale * parts[f"{path}.{view}"]
            for one, two in ((logits.softmax(1), other.softmax(1)), (logits.T.softmax(1), other.T.softmax(1))):
                divergence += (one * (one.log() - two.log())).sum(1).mean() / 2
    torch.testing.assert_close(terms, expected | {"divergence": 0.1 * divergence})


@pytest.mark.parametrize("name", TABLES)
def test_every_ablation_trains_and_scores_within_reach_of_a_cosine(name):
    made = module(**TABLES[name]).train()
    some = pairs(made, patches=16)
    torch.stack(list(made.losses(some).values())).sum().backward()
    # DDP waits for every parameter: none may be left without a gradient.
    unused = [n for n, p in made.named_parameters() if p.grad is None and not n.startswith("encoder.")]
    assert not unused
    scores = made.eval().score(some.text, some.video)
    assert set(scores.parts) == set(made.options.views)
    assert bool((scores.similarity.abs() <= 1 + 1e-5).all())
    torch.testing.assert_close(scores.similarity, torch.stack(list(scores.parts.values())).mean(0))


PATHS = {"spot", "recover", "divergence"}


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"path_weight": 0.2}, {"spot", "recover"}),
        ({"divergence": Divergence(weight=0.3)}, {"divergence"}),
        ({"divergence": Divergence(scores="cosines")}, {"divergence"}),
        ({"divergence": Divergence(reduction="mean")}, {"divergence"}),
        ({"divergence": Divergence(direction="path-to-original")}, {"divergence"}),
        ({"spot_ratio": 0.3}, PATHS),
        ({"spot_partition": "pairwise"}, PATHS),
        ({"macro_interaction": "weighted-max"}, {"macro"} | PATHS),
        ({"macro_interaction": "mean"}, {"macro"} | PATHS),
        ({"micro_interaction": "mean"}, {"micro"} | PATHS),
        ({"patch_reduction": EveryPatch()}, {"micro"} | PATHS),
    ],
)
def test_a_switch_changes_the_terms_that_it_should(options, changed):
    plain, other = module(), module(**options)
    shared = {name: tensor for name, tensor in plain.state_dict().items() if name in other.state_dict()}
    other.load_state_dict(shared, strict=False)
    ours, theirs = plain.losses(pairs(plain)), other.losses(pairs(other))
    found = {name for name in ours if not torch.allclose(ours[name], theirs[name], rtol=1e-5)}
    assert found == changed


def test_divergence_vanishes_where_a_path_agrees_and_teaches_one_side_in_the_reverse():
    original, path = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
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


# What reaches the score


def test_nothing_of_the_captions_reaches_the_score():
    made = module().eval()
    some = pairs(made)
    before = made.score(some.text, some.video).similarity
    other = dataclasses.replace(some, extras={"captions": features(seed=9)[2]})
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
    words = captions.words.clone()
    for place, played in ((1, False), (0, True)):
        words[torch.arange(B), order[:, place]] = 5.0
        changed = made.losses(pairs(made, words=words))["recover"]
        assert torch.equal(made.losses(some)["recover"], changed) is not played


def test_videos_may_have_fewer_captions_than_others():
    made = module(recover_captions=2)
    captions = features()[2]
    mask = captions.mask.clone()
    mask[0, 2:] = False
    noise = captions.words.masked_fill(~mask[:, :, None, None], 8.0)
    ours, theirs = (made.losses(pairs(made, mask=mask, words=words)) for words in (captions.words, noise))
    assert torch.equal(ours["recover"], theirs["recover"])


def test_several_recovered_captions_have_learned_weights_and_a_single_one_has_none():
    for count in (1, 2, 3):
        names = [name for name, _ in module(recover_captions=count).named_parameters()]
        assert any("macro.text_weights" in name for name in names) is (count > 1)


def test_padding_plays_no_part_in_any_loss():
    made = module()
    text, video, _ = features()
    noisy = dataclasses.replace(
        video,
        frames=video.frames.masked_fill(~video.frame_mask.unsqueeze(-1), 7.0),
        patches=video.patches.masked_fill(~video.frame_mask[:, :, None, None], -7.0),
    )
    padded = dataclasses.replace(text, words=text.words.masked_fill(~text.word_mask.unsqueeze(-1), 3.0))
    torch.testing.assert_close(made.losses(pairs(made, text=padded, video=noisy)), made.losses(pairs(made)))


@torch.no_grad()
def test_mean_pooling_is_the_mean_over_frames_and_patches_that_are_there():
    made = module(views=("micro",), micro_interaction="mean", patch_reduction=AveragePatches()).eval()
    text, video, _ = features()
    words = (text.words * text.word_mask.unsqueeze(-1)).sum(1) / text.word_mask.sum(1, keepdim=True)
    mask = video.frame_mask[:, :, None, None]
    patches = (video.patches * mask).sum((1, 2)) / (mask.sum((1, 2)) * P)
    expected = unit(words) @ unit(patches).T
    torch.testing.assert_close(made.score(text, made.encode_video(video)).similarity, expected)


def test_identical_frames_and_patches_have_a_defined_score():
    flat = dataclasses.replace(features()[1], frames=torch.ones(B, F, D), patches=torch.ones(B, F, P, D))
    made = module()
    assert all(bool(term.isfinite()) for term in made.losses(pairs(made, video=flat)).values())


# Captions


def videos(count):
    media = Media(torch.zeros(count, F, 3, 32, 32, dtype=torch.uint8), torch.ones(count, F, dtype=torch.bool))
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
    without = module(paths=("spot",), views=("macro",))
    assert without.encode_extras(batch) == {}
    assert made.needs_patches
    assert not without.needs_patches


def test_missing_captions_are_named():
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


def test_the_recipe_is_the_paper_and_overlays_change_it(recipe):
    def options(*overlays):
        return recipe("dpdv", *overlays)[0].options

    assert options() == DPDVOptions()
    assert options("variants/dpdv-paper").patch_reduction == PatchMerging(heads=1)
    assert options("variants/dpdv-spot").paths == ("spot",)
    assert options("variants/dpdv-captions-3").recover_captions == 3
