"""X-CLIP against the authors' code, a plain restatement, and its switches one by one."""

import json
import math
from pathlib import Path

import pytest
import torch
from parity.case import load_case
from torch import Tensor

from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import MeanAggregation, SoftmaxAggregation
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods.clip4clip import TightTransf
from tvr_lightning.methods.xclip import AOSM, XCLIP, XCLIPHead, XCLIPOptions
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parents[2] / "recipes"
W, F, D = 7, 4, 16
CONTRASTS = ("video_sentence", "video_word", "sentence_frame", "frame_word")
AGGREGATIONS = (AOSM, SoftmaxAggregation, MeanAggregation)


def features(texts=5, videos=4, seed=0, dimension=D, words=W, frames=F):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    word_mask = torch.arange(words) < torch.arange(texts)[:, None] % (words - 1) + 2
    frame_mask = torch.arange(frames) < torch.arange(videos)[:, None] % frames + 1
    text = TextFeatures(normal(texts, dimension), normal(texts, words, dimension), word_mask)
    frames_after, before = normal(videos, frames, dimension), normal(videos, frames, dimension)
    return text, VideoFeatures(frames_after, frame_mask, clip_frames=before)


def head(**options):
    torch.manual_seed(1)
    made = XCLIPHead(D, W, F, XCLIPOptions(**{"similarity_header": MeanP(), **options}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def method(**options):
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=16, patch_size=8, text_layers=4, vision_layers=1)
    return XCLIP(encoder, words=W, frames=F, xclip=XCLIPOptions(**options))


def test_a_checkpoint_for_other_words_and_frames_says_what_fits(parity_cases):
    checkpoint = load_case(parity_cases / "xclip_meanP.safetensors").checkpoint
    with pytest.raises(UserError, match=r"for 12 words and 6 frames, not for 32 words and 12 frames. Pass --words 12"):
        import_checkpoint(checkpoint, "file")
    del checkpoint["global_mat_weight"]
    with pytest.raises(UserError, match="file is a checkpoint of CLIP4Clip, not of X-CLIP"):
        import_checkpoint(checkpoint, "file", words=12, frames=6, method="xclip")


def aggregated(values: list[Tensor], matrix: Tensor) -> Tensor:
    exponents = [(v / 0.01).double() for v in values]
    largest = max(exponents)
    weights = [(e - largest).exp() for e in exponents]
    total = sum(weights)
    mixed = [sum(w / total * matrix[s, t] for s, w in enumerate(weights)) for t in range(len(values))]
    return sum(v * w for v, w in zip(values, mixed, strict=True))


def test_scores_are_the_definition_pair_by_pair():
    text, video = features()
    made = head().double()
    text, video = text.to(torch.float64), video.to(torch.float64)
    scores = made(text, video)
    unit = torch.nn.functional.normalize
    for i in range(len(text)):
        sentence, words = unit(text.sentence[i], dim=0), unit(text.words[i], dim=-1)
        for j in range(len(video)):
            real = unit(video.frames[j], dim=-1)[video.frame_mask[j]]
            pooled, frames = unit(real.mean(0), dim=0), unit(video.clip_frames[j], dim=-1)
            expected = {"video_sentence": sentence @ made.global_matrix @ pooled}
            expected["video_word"] = aggregated(list(words @ pooled), made.video_word.weight)
            expected["sentence_frame"] = aggregated(list(frames @ sentence), made.sentence_frame.weight)
            matrix = words @ made.local_matrix @ frames.T
            of_frames = [aggregated(list(matrix[:, f]), made.frame_word.words.weight) for f in range(F)]
            of_words = [aggregated(list(matrix[w]), made.frame_word.frames.weight) for w in range(W)]
            expected["frame_word"] = (
                aggregated(of_frames, made.frame_word.frames_after_words.weight)
                + aggregated(of_words, made.frame_word.words_after_frames.weight)
            ) / 2
            for name, value in expected.items():
                assert scores.parts[name][i, j].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12), name
            assert scores.similarity[i, j].item() == pytest.approx(sum(v.item() for v in expected.values()) / 4)


@pytest.mark.parametrize("contrasts", [CONTRASTS, *[(name,) for name in CONTRASTS], ("frame_word", "video_word")])
def test_contrasts_are_averaged_and_only_theirs_have_parameters(contrasts):
    text, video = features()
    scores = head(contrasts=contrasts)(text, video)
    assert set(scores.parts) == set(contrasts)
    torch.testing.assert_close(scores.similarity, torch.stack([scores.parts[n] for n in contrasts]).mean(0))
    made = head(contrasts=contrasts)
    made(text, video).similarity.square().sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_blocks_do_not_change_scores():
    text, video = features(9, 8)
    made = head()
    scores = made(text, video)
    for i in range(0, 9, 4):
        for j in range(0, 8, 3):
            part = made(text[[i]], video[[j]])
            torch.testing.assert_close(part.similarity[0, 0], scores.similarity[i, j], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_words_and_frames_are_as_if_cut_off(aggregation):
    text, video = features(texts=3, videos=3)
    made = head(similarity_aggregation=aggregation(), mask_words=True, mask_frames=True)
    scores = made(text, video).similarity
    changed_text = TextFeatures(text.sentence, text.words.masked_fill(~text.word_mask[..., None], 3.0), text.word_mask)
    changed_frames = video.clip_frames.masked_fill(~video.frame_mask[..., None], -2.0)
    changed_video = VideoFeatures(video.frames, video.frame_mask, clip_frames=changed_frames)
    torch.testing.assert_close(made(changed_text, changed_video).similarity, scores)
    released = head(similarity_aggregation=aggregation())
    assert not torch.allclose(released(changed_text, changed_video).similarity, released(text, video).similarity)
    assert not torch.allclose(released(text, video).similarity, scores)


def test_aggregations_are_what_they_say():
    x = torch.tensor([[0.1], [0.5], [-0.2]])
    assert MeanAggregation().module(3)(x).item() == pytest.approx(x.mean().item())
    weights = (x / 0.1).softmax(0)
    assert SoftmaxAggregation(10.0).module(3)(x).item() == pytest.approx((x * weights).sum().item())
    attention = AOSM(10.0).module(3)
    assert attention(x).item() == pytest.approx((x * weights).sum().item())  # it starts as the identity
    low, high = (AOSM(scale).module(3)(x).item() for scale in (1000.0, 0.01))
    assert low == pytest.approx(0.5, abs=1e-5)
    assert high == pytest.approx(x.mean().item(), abs=1e-3)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_video_without_frames_and_a_text_without_words_score_nothing(aggregation):
    text, video = features(texts=2, videos=2)
    text.word_mask[0] = False
    video.frame_mask[1] = False
    made = head(similarity_aggregation=aggregation(), mask_words=True, mask_frames=True)
    scores = made(text, video)
    assert bool((scores.parts["video_word"][0] == 0).all())
    assert bool((scores.parts["sentence_frame"][:, 1] == 0).all())
    assert bool((scores.parts["frame_word"][0] == 0).all() and (scores.parts["frame_word"][:, 1] == 0).all())
    assert bool((scores.parts["frame_word"][1, 0] != 0).all())
    scores.similarity.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


@pytest.mark.parametrize("header", [MeanP(), SeqLSTM(), SeqTransf()])
def test_frame_contrasts_take_clips_own_frames(header):
    text, video = features(dimension=64)
    model = method(similarity_header=header).eval()
    plain = VideoFeatures(video.frames, video.frame_mask)
    related = model.encode_video(plain)
    parts = model.score(text, related).parts
    own = model.head(text, plain).parts
    torch.testing.assert_close(parts["sentence_frame"], own["sentence_frame"])
    torch.testing.assert_close(parts["frame_word"], own["frame_word"])
    assert torch.allclose(parts["video_word"], own["video_word"]) is (header == MeanP())


def test_ten_steps_reduce_the_loss():
    text, video = features(6, 6, dimension=64)
    model = method(similarity_header=SeqTransf(2))
    pairs = PairedFeatures(text, video, torch.arange(6), torch.arange(6))
    optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if not n.startswith("encoder.")], 3e-3)
    losses = []
    for _ in range(10):
        related = PairedFeatures(text, model.encode_video(pairs.video), pairs.text_index, pairs.video_index)
        (loss,) = model.losses(related).values()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert math.isfinite(losses[-1])
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contrasts": ("words",)}, "it must be one of video_sentence"),
        ({"contrasts": ()}, "it must contain some of"),
        ({"contrasts": ("video_word", "video_word")}, "each once"),
        ({"similarity_header": TightTransf()}, "must be a TemporalHeader"),
        ({"similarity_aggregation": "max"}, "must be a Aggregation"),
        ({"similarity_aggregation": AOSM(0.0)}, "softmax_lambda is 0.0; it must be above 0"),
        ({"similarity_header": SeqTransf(0)}, "blocks is 0"),
        ({"contrasts": ("frame_word",)}, "Set similarity_header to MeanP"),
        ({"contrasts": ("video_sentence",), "similarity_aggregation": MeanAggregation()}, "nothing to aggregate"),
        ({"contrasts": ("video_sentence", "sentence_frame"), "mask_words": True}, "has words to mask"),
        ({"contrasts": ("video_word",), "mask_frames": True}, "has frames to mask"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        method(**options)


def test_other_sizes_than_the_matrices_are_refused():
    text, video = features(words=W + 1)
    with pytest.raises(ValueError, match="built for 7 words and 4 frames"):
        head()(text, video)


@pytest.mark.slow
def test_the_recipe_learns_the_fixture(tmp_path):
    synthesize("msrvtt", tmp_path / "fixture", 500, 0, workers=2, progress=False)
    recipes = [f"--config={RECIPES / name}.yaml" for name in ("xclip", "fixture")]
    options = [f"--data.init_args.root={tmp_path / 'fixture'}", f"--results.directory={tmp_path / 'runs'}"]
    assert main(["fit", *recipes, *options, "--trainer.accelerator=cpu"]) == 0
    results = json.loads((tmp_path / "runs" / "xclip-msrvtt" / "version_0" / "results.json").read_text())
    print(results["text_to_video"])
    assert results["text_to_video"]["R@1"] >= 15 * 100 / results["videos"]
