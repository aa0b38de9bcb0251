"""X-Pool against the authors' code, its forms against each other, its pooling baselines against their definition."""

import json
from pathlib import Path

import pytest
import torch
from parity.case import load_case

from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.xpool import CrossAttentionConfig, XPool, XPoolConfig, XPoolHead
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parents[2] / "recipes"
N, M, F, D = 5, 4, 6, 64
POOLINGS = {
    "transformer": {},
    "mean": {},
    "top-k": {"top_k": 2},
    "attention": {"attention_temperature": 0.1},
}


def features(texts=N, videos=M, padded=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sentence = torch.randn(texts, D, generator=generator)
    frames = torch.randn(videos, F, D, generator=generator)
    lengths = torch.tensor([F - (j % 3) * 2 if padded else F for j in range(videos)])
    mask = torch.arange(F) < lengths[:, None]
    return TextFeatures(sentence, sentence[:, None], torch.ones(texts, 1, dtype=torch.bool)), VideoFeatures(
        frames, mask
    )


def head(pooling="transformer", form="auto", dropout=0.0, heads=1, **options):
    torch.manual_seed(0)
    attention = CrossAttentionConfig(heads, dropout) if pooling == "transformer" else CrossAttentionConfig()
    made = XPoolHead(D, XPoolConfig(pooling=pooling, attention=attention, form=form, **options))
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made.eval()


@pytest.mark.parametrize("form", ["factorised", "dense"])
def test_the_authors_case_holds(parity_cases, form):
    case = load_case(parity_cases / "xpool.safetensors")
    made = XPoolHead(64, XPoolConfig(attention=CrossAttentionConfig(dropout=0.0), form=form)).eval()
    state = {name.removeprefix("pool_frames."): tensor for name, tensor in case.checkpoint.items()}
    made.attention.load_state_dict(state)
    text, frames = case.input("text_embedding"), case.input("frame_embeddings")
    mask = torch.ones(frames.shape[:2], dtype=torch.bool)
    similarity = made(TextFeatures(text, text[:, None], mask[:1]), VideoFeatures(frames, mask)).similarity
    torch.testing.assert_close(similarity, case.expected["similarity"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pooling", "heads"), [("transformer", 4), *((name, 1) for name in POOLINGS)])
def test_both_forms_give_the_same_scores(pooling, heads):
    text, video = features()
    made = [head(pooling, form, heads=heads, **POOLINGS[pooling]) for form in ("dense", "factorised")]
    dense, factorised = (one(text, video).similarity for one in made)
    torch.testing.assert_close(factorised, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "top-k", "attention"])
def test_baselines_pool_unit_frames_as_the_paper_says(pooling):
    text, video = features()
    similarity = head(pooling, **POOLINGS[pooling])(text, video).similarity
    for i, sentence in enumerate(unit(text.sentence)):
        for j in range(M):
            frames = unit(video.frames[j][video.frame_mask[j]])
            cosines = frames @ sentence
            if pooling == "mean":
                pooled = frames.mean(0)
            elif pooling == "top-k":
                pooled = frames[cosines.topk(2).indices].sum(0)
            else:
                pooled = (cosines / 0.1).softmax(0) @ frames
            expected = torch.cosine_similarity(sentence, pooled, dim=0).item()
            assert similarity[i, j].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padded_frames_change_nothing(pooling):
    text, video = features()
    made = head(pooling, **POOLINGS[pooling])
    other = VideoFeatures(torch.where(video.frame_mask[..., None], video.frames, 9.0), video.frame_mask)
    torch.testing.assert_close(made(text, other).similarity, made(text, video).similarity)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_score_depends_on_its_pair_alone(pooling):
    text, video = features()
    made = head(pooling, **POOLINGS[pooling])
    whole = made(text, video).similarity
    texts, videos = [3, 1], [2, 0, 3]
    torch.testing.assert_close(made(text[texts], video[videos]).similarity, whole[texts][:, videos])


def test_a_small_budget_changes_nothing():
    text, video = features(texts=300, videos=20)
    small, large = head(form="dense", memory_budget=1), head(form="dense", memory_budget=512)
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


def test_every_option_changes_the_scores():
    text, video = features()
    scores = [head(pooling, **options)(text, video).similarity for pooling, options in POOLINGS.items()]
    scores += [
        head("top-k", top_k=3)(text, video).similarity,
        head("attention", attention_temperature=1.0)(text, video).similarity,
        head("attention")(text, video).similarity,  # at the released temperature
        head(heads=4)(text, video).similarity,
    ]
    for i, one in enumerate(scores):
        for other in scores[:i]:
            assert not torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "top-k"}, "top_k is None with pooling: top-k"),
        ({"top_k": 3}, "top_k belongs to pooling: top-k"),
        ({"pooling": "top-k", "top_k": 0}, "top_k is 0"),
        ({"attention_temperature": 0.1}, "belongs to pooling: attention"),
        ({"pooling": "attention", "attention_temperature": 0.0}, "must be above 0"),
        ({"pooling": "mean", "attention": CrossAttentionConfig(heads=2)}, "builds no cross-attention"),
        ({"form": "factorised"}, "attention.dropout 0.3"),
        ({"memory_budget": 0}, "memory_budget is 0"),
        ({"attention": CrossAttentionConfig(heads=7)}, "must divide the dimension 64"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    encoder = TinyClipEncoder(width=64, image_size=16, text_layers=1, vision_layers=1)
    with pytest.raises(ValueError, match=message):
        XPool(encoder, **options)


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
