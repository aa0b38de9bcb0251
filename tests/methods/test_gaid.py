"""GAID against the paper, pair by pair; its losses and its use of audio."""

import pytest
import torch
from methods.parts import FORMS, black_videos, build, encoder, features, moved, paired

from tvr_lightning.encoders import TinyWhisperEncoder
from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.stochastic import Normal, trial_draws
from tvr_lightning.methods import GAID
from tvr_lightning.methods.gaid.model import GAIDHead, pair_weights
from tvr_lightning.methods.gaid.options import DASP, STP, GAIDOptions, GatedFusion, NoFusion, NoPerturbation
from tvr_lightning.methods.tmass import score_as_released
from tvr_lightning.methods.xpool import XPoolOptions
from tvr_lightning.training.losses import info_nce

N, F, D = 4, 4, 32
FUSIONS = ["none", "sample", "frame", "token"]
PERTURBATIONS = {"none": NoPerturbation(), "stp": STP(), "dasp": DASP()}


def head(fusion="frame", perturbation="dasp", form=None, heads=1, dropout=0.0, text="query", **options):
    torch.manual_seed(0)
    kind = PERTURBATIONS[perturbation] if isinstance(perturbation, str) else perturbation
    fusion = NoFusion() if fusion == "none" else GatedFusion(fusion, text)
    made = GAIDHead(D, F, GAIDOptions(fusion, kind, attention=XPoolOptions(heads, dropout), **options))
    made.required_form = FORMS.get(form)
    return moved(made).eval()


def draws_of(made):
    kind = made.options.perturbation
    return trial_draws(kind.prior, kind.trials, D, seed=0) if isinstance(kind, STP) else None


def model(**options):
    return build(GAID, options, torch.float32)


def plain_score(made, sentence, frames, audio, mask):
    """Score one text against one video; tests/pairwise compare the attention with that of torch."""
    fused = frames
    if made.gate is not None:  # f = g a + (1 - g) v
        parts = [frames, audio]
        if made.gate.level == "sample":
            parts = [part[mask].mean(0, keepdim=True) for part in parts]
        if made.gate.text != "none":
            parts.append(sentence.expand(len(parts[0]), -1))
        gate = made.gate.linear(torch.cat(parts, dim=-1)).sigmoid()
        fused = gate * audio + (1 - gate) * frames
    queries = made.attention.queries(sentence.view(1, 1, D))
    z = made.attention(queries, fused[mask].unsqueeze(0)).materialize().flatten()
    text = sentence / sentence.norm() if made.options.normalize_text else sentence
    if made.radius is None:
        return torch.cosine_similarity(text, z, dim=0)
    std = made.radius.linear_proj(torch.cosine_similarity(sentence[None], fused, dim=-1) * mask).exp()
    if made.alpha is not None:
        return torch.cosine_similarity(text + made.alpha[0] * std, z, dim=0)
    return torch.cosine_similarity(text + draws_of(made) * std, z[None], dim=-1).amax()


SWITCHES = [
    *({"fusion": fusion, "perturbation": kind} for fusion in FUSIONS for kind in PERTURBATIONS),
    {"text": "paired"},
    {"text": "none"},
    {"fusion": "token", "text": "none"},
    {"fusion": "token", "heads": 4},
    {"normalize_text": True},
    {"perturbation": STP(Normal(0.5), trials=3), "normalize_text": True},
]


@torch.no_grad()
@pytest.mark.parametrize("options", SWITCHES, ids=str)
def test_both_forms_match_the_paper_and_own_captions_score_as_released(options):
    text, video = features(N, N, width=D)
    videos = list(zip(video.frames, video.audio, video.frame_mask, strict=True))
    for form in FORMS:
        made = head(form=form, **options)
        clean = made(text, video, draws_of(made)).similarity
        expected = torch.stack([plain_score(made, each, *one) for each in text.sentence for one in videos]).view(N, N)
        torch.testing.assert_close(clean, expected, rtol=1e-4, atol=2e-6)
        released = score_as_released(made, text, video, text, draws_of(made)).similarity
        torch.testing.assert_close(released.diagonal(), clean.diagonal(), rtol=1e-4, atol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("fusion", FUSIONS[1:])
def test_the_text_of_the_gate_changes_only_pairs_that_do_not_match(fusion):
    (text, video), draw = features(N, N, width=D), torch.rand(N, D)
    query, paired = (head(fusion, text=g).train_cosines(text, video, draw)[0] for g in ("query", "paired"))
    own = torch.eye(N, dtype=torch.bool)
    torch.testing.assert_close(query[own], paired[own], rtol=1e-4, atol=1e-6)
    assert ((query - paired).abs()[~own] > 1e-5).any()


def terms_of(**options):
    """The loss of a model and the cosines of the same draws."""
    made = model(**options).eval()
    text, video = features(N, N)
    torch.manual_seed(3)
    terms = made.losses(paired(text, video))
    torch.manual_seed(3)
    moved = not isinstance(made.options.perturbation, NoPerturbation)
    sigma = made.options.perturbation.prior.draw((N, 64)) if moved else None
    return terms, made.head.train_cosines(text, video, sigma), made.temperature()


@pytest.mark.parametrize("weighting", ["released", "positive", "uniform"])
def test_both_branches_are_weighted_by_the_perturbed_similarities(weighting):
    terms, cosines, scale = terms_of(loss_weighting=weighting, perturbation=DASP(support_weight=0.3))
    weight = pair_weights(cosines[0], weighting)
    torch.testing.assert_close(terms["perturbation"], info_nce(scale * cosines[0], weight=weight))
    torch.testing.assert_close(terms["support"], 0.3 * info_nce(scale * cosines[1], weight=weight))
    for without in (DASP(support_weight=0.0), NoPerturbation()):
        assert list(terms_of(perturbation=without)[0]) == ["perturbation"]


def test_positive_weights_ignore_negative_similarities():
    mixed = torch.diag(torch.tensor([0.6, -0.2, 0.2]))
    torch.testing.assert_close(pair_weights(mixed, "positive"), torch.tensor([0.75, 0.0, 0.25]))
    torch.testing.assert_close(pair_weights(mixed, "released"), torch.tensor([1.0, -1 / 3, 1 / 3]))
    torch.testing.assert_close(pair_weights(-torch.eye(4), "positive"), torch.full((4,), 0.25))
    assert pair_weights(mixed, "uniform") is None


def test_missing_audio_is_reported_with_the_option_that_provides_it():
    made = model()
    assert isinstance(made.audio_encoder, TinyWhisperEncoder)
    with pytest.raises(ValueError, match=r"Set data\.init_args\.audio to whisper"):
        made.video_features(black_videos(2))
    frames = torch.randn(2, F, 64)
    with pytest.raises(ValueError, match=r"GatedFusion needs audio.*data\.init_args\.audio"):
        made.encode_video(VideoFeatures(frames, torch.ones(2, F, dtype=torch.bool)))
    silent = model(fusion=NoFusion())
    assert silent.audio_encoder is None
    assert silent.video_features(black_videos(2)).audio is None


def test_audio_is_projected_to_the_width_of_frames_and_silence_is_zero():
    narrow, wide = (
        GAID(encoder(), frames=F, gaid=GAIDOptions(), audio_encoder=TinyWhisperEncoder(width=width))
        for width in (32, 64)
    )
    frames, audio, mask = torch.randn(2, F, 64), torch.randn(2, F, 32), torch.ones(2, F, dtype=torch.bool)
    mask[1, 2:] = False
    video = narrow.encode_video(VideoFeatures(frames, mask | True, audio=audio, audio_mask=mask))
    assert video.audio.shape == (2, F, 64)
    torch.testing.assert_close(video.audio[mask], narrow.audio_projection(audio)[mask])
    assert not video.audio[~mask].any()
    assert wide.audio_projection is None
    assert not wide.temperature.logit_scale.requires_grad
