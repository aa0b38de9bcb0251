"""X-CLIP against the authors' code, a plain restatement, and its switches one by one."""

import pytest
import torch
from methods.parts import build, moved
from methods.parts import features as all_features
from parity.case import load_case
from torch import Tensor

from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import MeanAggregation, SoftmaxAggregation
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods import XCLIP
from tvr_lightning.methods.xclip import AOSM, XCLIPHead, XCLIPOptions

W, F, D = 6, 4, 16
CONTRASTS = ("video_sentence", "video_word", "sentence_frame", "frame_word")
AGGREGATIONS = (AOSM, SoftmaxAggregation, MeanAggregation)


def features(texts=5, videos=4, **sizes):
    return all_features(texts, videos, **{"width": D, **sizes})


def head(**options):
    torch.manual_seed(1)
    return moved(XCLIPHead(D, W, F, XCLIPOptions(**{"similarity_header": MeanP(), **options})))


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
    text, video = features(dtype=torch.float64)
    made = head().double()
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


def test_attention_over_similarities_starts_as_the_identity_between_the_maximum_and_the_mean():
    x = torch.tensor([[0.1], [0.5], [-0.2]])
    found = [AOSM(scale).module(3)(x).item() for scale in (10.0, 1000.0, 0.01)]
    assert found == pytest.approx([(x * (x / 0.1).softmax(0)).sum().item(), 0.5, x.mean().item()], abs=1e-3)


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
    text, video = features(width=64)
    model = build(XCLIP, {"similarity_header": header}, torch.float32).eval()
    plain = VideoFeatures(video.frames, video.frame_mask)
    related = model.encode_video(plain)
    parts = model.score(text, related).parts
    own = model.head(text, plain).parts
    torch.testing.assert_close(parts["sentence_frame"], own["sentence_frame"])
    torch.testing.assert_close(parts["frame_word"], own["frame_word"])
    assert torch.allclose(parts["video_word"], own["video_word"]) is (header == MeanP())
