"""X-Pool against the authors' code, and its forms against each other."""

import json
from pathlib import Path

import pytest
import torch
from parity.case import load_case

from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods.xpool import XPool, XPoolHead, XPoolOptions
from tvr_lightning.pairwise import DensePairVectors, PairVectors
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parents[2] / "recipes"
N, M, F, D = 5, 4, 6, 64
FORMS = {"factorised": PairVectors, "dense": DensePairVectors}


def features(texts=N, videos=M, padded=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sentence = torch.randn(texts, D, generator=generator)
    frames = torch.randn(videos, F, D, generator=generator)
    lengths = torch.tensor([F - (j % 3) * 2 if padded else F for j in range(videos)])
    mask = torch.arange(F) < lengths[:, None]
    return TextFeatures(sentence, sentence[:, None], torch.ones(texts, 1, dtype=torch.bool)), VideoFeatures(
        frames, mask
    )


def head(form=None, dropout=0.0, heads=1, per="pair"):
    torch.manual_seed(0)
    made = XPoolHead(D, F, XPoolOptions(heads, dropout, per))
    made.required_form = FORMS.get(form)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made.eval()


@pytest.mark.parametrize("form", ["factorised", "dense"])
def test_the_authors_case_holds(parity_cases, form):
    case = load_case(parity_cases / "xpool.safetensors")
    made = XPoolHead(64, case.input("frame_embeddings").shape[1], XPoolOptions(dropout=0.0)).eval()
    made.required_form = FORMS[form]
    state = {name.removeprefix("pool_frames."): tensor for name, tensor in case.checkpoint.items()}
    made.attention.load_state_dict(state)
    text, frames = case.input("text_embedding"), case.input("frame_embeddings")
    mask = torch.ones(frames.shape[:2], dtype=torch.bool)
    similarity = made(TextFeatures(text, text[:, None], mask[:1]), VideoFeatures(frames, mask)).similarity
    torch.testing.assert_close(similarity, case.expected["similarity"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_both_forms_give_the_same_scores(heads):
    text, video = features()
    dense, factorised = (head(form, heads=heads)(text, video).similarity for form in ("dense", "factorised"))
    torch.testing.assert_close(factorised, dense, rtol=1e-5, atol=1e-6)


def test_padded_frames_change_nothing():
    text, video = features()
    other = VideoFeatures(torch.where(video.frame_mask[..., None], video.frames, 9.0), video.frame_mask)
    torch.testing.assert_close(head()(text, other).similarity, head()(text, video).similarity)


def test_a_score_depends_on_its_pair_alone():
    text, video = features()
    whole = head()(text, video).similarity
    texts, videos = [3, 1], [2, 0, 3]
    torch.testing.assert_close(head()(text[texts], video[videos]).similarity, whole[texts][:, videos])


def test_a_small_budget_changes_nothing():
    text, video = features(texts=300, videos=20)
    small, large = head("dense"), head("dense")
    small.memory_gib = 2**-10
    with torch.no_grad():
        torch.testing.assert_close(small(text, video).similarity, large(text, video).similarity)


def test_dropout_is_drawn_in_training_alone():
    text, video = features()
    made = head(dropout=0.5)
    still = made(text, video).similarity
    assert torch.equal(still, made(text, video).similarity)
    made.train()
    torch.manual_seed(0)
    first, second = made(text, video).similarity, made(text, video).similarity
    assert not torch.allclose(first, second, atol=1e-3)


def test_draws_per_video_are_the_same_in_both_forms_and_refused_without_dropout():
    text, video = features()
    found = []
    for form in ("dense", "factorised"):
        made = head(form, dropout=0.5, per="video").train()
        torch.manual_seed(0)
        found.append(made(text, video).similarity)
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="dropout_per is video, but dropout is 0"):
        XPoolOptions(dropout=0.0, dropout_per="video")


def test_heads_change_the_scores():
    text, video = features()
    assert not torch.allclose(head()(text, video).similarity, head(heads=4)(text, video).similarity, atol=1e-4)


def test_heads_that_do_not_divide_the_dimension_are_refused():
    encoder = TinyClipEncoder(width=64, image_size=16, text_layers=1, vision_layers=1)
    with pytest.raises(ValueError, match="must divide the dimension 64"):
        XPool(encoder, xpool=XPoolOptions(heads=7))


def test_ten_steps_lower_the_loss():
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=D, image_size=16, text_layers=1, vision_layers=1)
    model = XPool(encoder, frames=F)
    text, video = features(8, 8, padded=False)
    pairs = PairedFeatures(text, video, torch.arange(8), torch.arange(8))
    parameters = [*model.head.parameters(), *model.temperature.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for _ in range(10):
        loss = model.losses(pairs)["info_nce"]
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in parameters)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_the_recipe_learns_the_fixture(tmp_path):
    synthesize("msrvtt", tmp_path / "fixture", 500, 0, workers=2, progress=False)
    configs = [f"--config={RECIPES / name}" for name in ("xpool.yaml", "fixture.yaml")]
    options = [f"--data.init_args.root={tmp_path / 'fixture'}", f"--results.directory={tmp_path / 'runs'}"]
    # Mirrored clips contradict the fixture's captions, which tell left from right.
    options += ["--data.init_args.augmentation=none", "--trainer.accelerator=cpu", "--trainer.max_epochs=60"]
    options.append("--model.init_args.optimizer.lr=1e-4")
    assert main(["fit", *configs, *options]) == 0
    (path,) = (tmp_path / "runs").glob("*/*/results.json")
    results = json.loads(path.read_text())
    assert results["text_to_video"]["R@1"] >= 15 * 100 / results["videos"]
