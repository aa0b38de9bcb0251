"""DPDV: its two paths, its losses, its captions, and what reaches the score in testing."""

import dataclasses

import pytest
import torch
from methods.parts import WIDTH, black_videos, captioned, encoder, features, moved, paired

from tvr_lightning.data.batch import PairBatch, TextBatch
from tvr_lightning.errors import UserError
from tvr_lightning.methods.dpdv.method import DPDV, nonempty
from tvr_lightning.methods.dpdv.model import recover_frames, spot_frames, view_divergence
from tvr_lightning.methods.dpdv.options import Divergence, DPDVOptions, EveryPatch
from tvr_lightning.methods.dpdv.options import SelectedPatches as Selected
from tvr_lightning.testing import random_pairs
from tvr_lightning.testing.contract import filled
from tvr_lightning.training.losses import info_nce

B, F, P, W, S = 5, 6, 9, 7, 4
NO_DIVERGENCE = {"divergence": Divergence(weight=0.0)}
MEANS = {"macro_interaction": "mean", "micro_interaction": "mean"}
UCOFIA = {"micro_interaction": "ucofia", "patch_reduction": Selected()}
ABLATIONS = [  # Tables 3 to 6 and S6 to S10
    {"paths": (), **NO_DIVERGENCE, **MEANS},
    {"paths": ("spot",), **MEANS},
    {"paths": ("recover",)},
    {"views": ("macro",)},
    {"views": ("micro",)},
    {"views": ("macro",), "macro_interaction": "ucofia"},
    {"views": ("micro",), **UCOFIA},
    {"original_loss": False, **NO_DIVERGENCE},
    {"original_loss": False, "spot_ratio": 2 / 3},
    {"recover_captions": 3},
]


def module(**options):
    torch.manual_seed(0)
    made = DPDV(encoder(), dpdv=DPDVOptions(captions=S, **options), words=W, frames=F)
    moved(made.head)
    return made


def inputs(patches=P, seed=0):
    text, video = features(B, B, words=W, frames=F, patches=patches, seed=seed)
    return text, video, captioned(B, S, words=W, seed=seed + 100)


def pairs(made, patches=P, text=None, video=None, **captions):
    """Pairs whose text, video and fields of captions may be given."""
    own_text, own_video, own_captions = inputs(patches)
    encoded = made.encode_video(video or own_video)
    return paired(text or own_text, encoded, captions=dataclasses.replace(own_captions, **captions))


def matching(made, some):
    return made.head.matching(some.text, some.video, some.extras["captions"])


# Partition


HALVES = [(length, 0.5, min((length + 1) // 2, length - 1)) for length in range(2, 13)]
RATIOS = [(1 / 3, 4), (2 / 3, 8), (0.66666667, 8), (0.3333, 4), (0.99, 11), (0.01, 1)]


@pytest.mark.parametrize(("length", "ratio", "kept"), [*HALVES, *((12, *each) for each in RATIOS)])
def test_the_spot_path_has_the_most_similar_frames_and_both_paths_have_frames(length, ratio, kept):
    mask, similarity = torch.arange(12) < length, torch.randn(12)
    spot = spot_frames(similarity, mask, ratio)
    assert int(spot.sum()) == kept
    assert not (spot & ~mask).any()
    rest = recover_frames(spot, mask)
    assert torch.equal(rest, mask & ~spot)
    assert similarity[spot].min() > similarity[rest].max()


def test_equal_frames_are_split_by_time_and_a_single_frame_is_in_both_paths():
    mask = torch.tensor([[True] * 4, [True, False, False, False], [False] * 4])
    spot = spot_frames(torch.zeros(3, 4), mask, 0.5)
    assert spot.tolist() == [[True, True, False, False], [True, False, False, False], [False] * 4]
    assert recover_frames(spot, mask).tolist() == [[False, False, True, True], [True, False, False, False], [False] * 4]


def test_a_pairwise_partition_agrees_with_the_paired_one_on_matching_pairs():
    one, pairwise = module(), module(spot_partition="pairwise")
    some = pairs(one)
    ours, theirs = matching(one, some), matching(pairwise, some)
    for name in ours:
        torch.testing.assert_close(ours[name].diagonal(), theirs[name].diagonal())
    for view in ("macro", "micro"):
        assert torch.equal(ours[view], theirs[view])
        assert not torch.allclose(ours[f"spot.{view}"], theirs[f"spot.{view}"], atol=1e-4)


# Losses


def test_losses_match_equation_12():
    made = module()
    some = pairs(made)
    terms, parts, scale = made.losses(some), matching(made, some), made.temperature()
    expected, divergence = {view: info_nce(scale * parts[view]) for view in ("macro", "micro")}, 0
    for path in ("spot", "recover"):
        expected[path] = 0.5 * sum(info_nce(scale * parts[f"{path}.{view}"]) for view in ("macro", "micro"))
        for view in ("macro", "micro"):
            divergence += sum(view_divergence(parts[view], parts[f"{path}.{view}"], scale, Divergence())) / 2
    torch.testing.assert_close(terms, expected | {"divergence": 0.1 * divergence})


@pytest.mark.parametrize("options", ABLATIONS)
def test_every_ablation_trains_and_scores_by_the_mean_of_its_views(options):
    made = module(**options).train()
    some = pairs(made, patches=16)
    torch.stack(list(made.losses(some).values())).sum().backward()
    unused = [n for n, p in made.named_parameters() if p.grad is None and not n.startswith("encoder.")]
    assert not unused, "DDP waits for every parameter"
    assert any("macro.text_weights" in n for n, _ in made.named_parameters()) is (made.options.recover_captions > 1)
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
        ({"spot_ratio": 0.3}, PATHS),
        ({"spot_partition": "pairwise"}, PATHS),
        ({"macro_interaction": "weighted-max"}, {"macro"} | PATHS),
        ({"macro_interaction": "mean"}, {"macro"} | PATHS),
        ({"micro_interaction": "mean"}, {"micro"} | PATHS),
        ({"patch_reduction": EveryPatch()}, {"micro"} | PATHS),
    ],
)
def test_an_option_changes_only_its_own_terms(options, changed):
    plain, other = module(), module(**options)
    shared = {name: tensor for name, tensor in plain.state_dict().items() if name in other.state_dict()}
    other.load_state_dict(shared, strict=False)
    ours, theirs = plain.losses(pairs(plain)), other.losses(pairs(other))
    assert {name for name in ours if not torch.allclose(ours[name], theirs[name], rtol=1e-5)} == changed


def test_the_reversed_divergence_trains_only_the_original():
    original, path = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    for direction, trained in (("original-to-path", True), ("path-to-original", False)):
        original.grad = path.grad = None
        terms = view_divergence(original, path, torch.tensor(2.0), Divergence(direction=direction))
        torch.stack(terms).sum().backward()
        assert bool((original.grad != 0).all())
        assert (path.grad is not None) is trained


def test_losses_do_not_depend_on_padding_and_are_finite_for_identical_frames_and_patches():
    made = module()
    text, video, _ = inputs()
    noisy = video.apply(lambda tensor: filled(tensor, video.frame_mask))
    padded = dataclasses.replace(text, words=filled(text.words, text.word_mask))
    torch.testing.assert_close(made.losses(pairs(made, text=padded, video=noisy)), made.losses(pairs(made)))
    flat = dataclasses.replace(video, frames=torch.ones(B, F, WIDTH), patches=torch.ones(B, F, P, WIDTH))
    assert all(bool(term.isfinite()) for term in made.losses(pairs(made, video=flat)).values())


# Captions


def test_the_chosen_captions_have_the_loss_of_all():
    made = DPDV(encoder(), dpdv=DPDVOptions(captions=6), words=20, frames=F).eval()
    batch = random_pairs(made, 4)
    found = made.pair_features(batch)
    assert found.extras["captions"].mask.shape == (4, 1)
    whole = dataclasses.replace(found, extras=made.encode_extras(batch))
    torch.testing.assert_close(made.losses(found), made.losses(whole))


def test_missing_captions_do_not_affect_the_loss():
    made, captions = module(recover_captions=2), inputs()[2]
    mask = torch.arange(S).expand(B, S) < 2
    words = captions.words.masked_fill(~mask[:, :, None, None], 8.0)
    present = {name: value[:, :2] for name, value in vars(captions).items()}
    losses = [made.losses(pairs(made, **given))["recover"] for given in ({"mask": mask, "words": words}, present)]
    torch.testing.assert_close(*losses)


def test_captions_are_encoded_like_texts():
    made = module().eval()
    said = [["a red circle", "  ", "a blue box"], ["a star moves up"]]
    batch = PairBatch(TextBatch(["x", "y"], torch.arange(2)), black_videos(2), {"recover_captions": said})
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


def test_missing_captions_are_reported():
    batch = PairBatch(TextBatch(["x"], torch.arange(1)), black_videos(1))
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
