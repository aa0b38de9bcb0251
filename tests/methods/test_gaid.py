"""GAID against the authors' code under both protocols, and every switch against a plain restatement, pair by pair."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from tvr_lightning.audit.experiments import audit_scores
from tvr_lightning.cli import main
from tvr_lightning.data.batch import Media, VideoBatch
from tvr_lightning.encoders import TinyClipEncoder, TinyWhisperEncoder
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.layers.stochastic import Prior, trial_draws
from tvr_lightning.methods.gaid import GAID, GAIDConfig, GAIDHead, pair_weights
from tvr_lightning.methods.xpool import CrossAttentionConfig
from tvr_lightning.recipe import from_recipe
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.losses import info_nce

RECIPES = Path(__file__).parents[2] / "recipes"
N, M, F, D = 4, 4, 5, 32
FUSIONS = ["none", "sample", "frame", "token"]
PERTURBATIONS = ["none", "stp", "dasp"]


def features(texts=N, videos=M, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    sentence = normal(texts, D)
    mask = torch.arange(F) < torch.tensor([F - j % 3 for j in range(videos)])[:, None]
    text = TextFeatures(sentence, sentence[:, None], torch.ones(texts, 1, dtype=torch.bool))
    return text, VideoFeatures(normal(videos, F, D), mask, audio=normal(videos, F, D), audio_mask=mask)


def head(fusion="frame", perturbation="dasp", form="auto", heads=1, dropout=0.0, **options):
    torch.manual_seed(0)
    attention = CrossAttentionConfig(heads, dropout)
    config = GAIDConfig(fusion=fusion, perturbation=perturbation, form=form, attention=attention, **options)
    made = GAIDHead(D, F, config)
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made.eval()


def model(**options):
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=16, text_layers=1, vision_layers=1)
    return GAID(encoder, frames=F, **options)


def fused_frames(made, sentence, frames, audio, mask):
    """Return f = g a + (1 - g) v of one video (F, D) under one text (D,), or under none."""
    if made.gate is None:
        return frames
    if made.gate.level == "sample":
        frame_part, audio_part = frames[mask].mean(0, keepdim=True), audio[mask].mean(0, keepdim=True)
    else:
        frame_part, audio_part = frames, audio
    parts = [frame_part, audio_part]
    if made.gate.text:
        parts.append(sentence.expand(len(frame_part), -1))
    gate = made.gate.linear(torch.cat(parts, dim=-1)).sigmoid()
    return gate * audio + (1 - gate) * frames


def pooled(made, sentence, frames, mask):
    """Return z (D,) of one video under one text: X-Pool's block, head by head."""
    block = made.attention
    width = D // block.heads
    query = block.cross_attn["q_proj"](block.layer_norm1(sentence))
    context = block.layer_norm1(frames[mask])
    keys, values = block.cross_attn["k_proj"](context), block.cross_attn["v_proj"](context)
    mixed = []
    for start in range(0, D, width):
        part = slice(start, start + width)
        weights = (keys[:, part] @ query[part] / math.sqrt(width)).softmax(0)
        mixed.append(weights @ values[:, part])
    hidden = block.layer_norm2(block.cross_attn["out_proj"](torch.cat(mixed)))
    return block.layer_norm3(hidden + block.linear_proj(hidden))


def plain_score(made, sentence, own, frames, audio, mask, draws):
    """Score one text against one video that is fused and pooled for the text `own`, or for the text itself."""
    fused = fused_frames(made, sentence if own is None else own, frames, audio, mask)
    z = pooled(made, sentence, fused, mask)
    target = z if own is None else pooled(made, own, fused, mask)
    text = sentence / sentence.norm() if made.config.normalize_text else sentence
    if made.radius is None:
        return torch.cosine_similarity(text, target, dim=0)
    cosines = torch.cosine_similarity(sentence[None], fused, dim=-1) * mask
    std = made.radius.linear_proj(cosines).exp()
    if made.alpha is not None:
        return torch.cosine_similarity(text + made.alpha[0] * std, target, dim=0)
    drawn = text + draws * std
    best = torch.cosine_similarity(drawn, z[None], dim=-1).argmax()
    return torch.cosine_similarity(drawn[best], target, dim=0)


def restated(made, text, video, own_text=None):
    draws = trial_draws(made.config.prior, made.config.trials, D, 0)
    rows = []
    for sentence in text.sentence:
        owners = [None] * len(video) if own_text is None else list(own_text.sentence)
        rows.append([
            plain_score(made, sentence, own, video.frames[j], video.audio[j], video.frame_mask[j], draws)
            for j, own in enumerate(owners)
        ])  # fmt: skip
    return torch.stack([torch.stack(row) for row in rows])


def switches():
    for fusion, perturbation in itertools.product(FUSIONS, PERTURBATIONS):
        yield {"fusion": fusion, "perturbation": perturbation}
    yield {"gate_text": "paired"}
    yield {"gate_text": "none"}
    yield {"fusion": "token", "gate_text": "none"}
    yield {"heads": 4}
    yield {"fusion": "token", "heads": 4}
    yield {"normalize_text": True}
    yield {"perturbation": "stp", "normalize_text": True, "trials": 3, "prior": Prior("normal", 0.5)}


@torch.no_grad()
@pytest.mark.parametrize("options", list(switches()), ids=str)
def test_both_forms_and_both_protocols_are_the_paper_pair_by_pair(options):
    text, video = features()
    by_query_token = options.get("fusion") == "token" and options.get("gate_text") != "none"
    for form in ("dense",) if by_query_token else ("dense", "factorised"):
        made = head(form=form, **options)
        similarity = made(text, video).similarity
        torch.testing.assert_close(similarity, restated(made, text, video), rtol=1e-4, atol=2e-6)
        released = made(text, video, own_text=text).similarity
        torch.testing.assert_close(released, restated(made, text, video, text), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("perturbation", PERTURBATIONS)
def test_a_score_depends_on_its_pair_alone(fusion, perturbation):
    text, video = features()
    made = head(fusion, perturbation)
    whole = made(text, video, seed=1).similarity
    texts, videos = [3, 1], [2, 0, 3]
    part = made(text[texts], video[videos], seed=1).similarity
    torch.testing.assert_close(part, whole[texts][:, videos], rtol=1e-4, atol=1e-6)
    small = head(fusion, perturbation, memory_budget=1)(text, video, seed=1).similarity
    torch.testing.assert_close(small, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("perturbation", PERTURBATIONS)
def test_the_released_protocol_leaks_but_on_the_diagonal(perturbation):
    text, video = features()
    made = head(perturbation=perturbation)
    clean, leaking = made(text, video).similarity, made(text, video, own_text=text).similarity
    own = torch.eye(N, dtype=torch.bool)
    torch.testing.assert_close(leaking[own], clean[own], rtol=1e-4, atol=1e-6)
    assert ((leaking - clean).abs()[~own] > 1e-4).all()


@pytest.mark.parametrize("perturbation", PERTURBATIONS)
def test_the_audit_passes_the_query_protocol_and_catches_the_released_one(perturbation):
    (text, video), made = features(8, 8), head(perturbation=perturbation)
    assert not audit_scores(text, video, torch.arange(8), score=made).leaks

    def as_released(texts, videos, own_texts):
        return made(texts, videos, own_text=own_texts)

    assert audit_scores(text, video, torch.arange(8), score_as_released=as_released).leaks


def test_a_closed_gate_is_deaf_and_an_open_one_blind():
    text, video = features()
    made, deaf = head(), head("none")
    deaf.load_state_dict({name: tensor for name, tensor in made.state_dict().items() if "gate" not in name})
    for bias, frames in ((-40.0, video.frames), (40.0, video.audio)):
        made.gate.linear.bias.data.fill_(bias)
        expected = deaf(text, VideoFeatures(frames, video.frame_mask)).similarity
        torch.testing.assert_close(made(text, video).similarity, expected, rtol=1e-4, atol=1e-6)


def test_perturbation_follows_equations_3_to_5():
    made, text, radius, draw = head(), torch.randn(3, D), torch.rand(3, D), torch.randn(3, D)
    made.alpha.data.fill_(0.3)
    torch.testing.assert_close(made.perturbed(text, radius, draw), text + (0.3 * draw + 0.7) * radius)
    made.alpha.data.fill_(1.0)
    stp = head(perturbation="stp")
    torch.testing.assert_close(made.perturbed(text, radius, draw), stp.perturbed(text, radius, draw))
    text, video = features()
    made.alpha.data.zero_()
    still = head(perturbation="none")
    still.load_state_dict({name: made.state_dict()[name] for name in still.state_dict()})
    torch.testing.assert_close(made(text, video).similarity, still(text, video).similarity, rtol=1e-4, atol=1e-6)


def test_trials_follow_the_seed():
    text, video = features()
    made = head(perturbation="stp")
    assert torch.equal(made(text, video, seed=1).similarity, made(text, video, seed=1).similarity)
    assert not torch.allclose(made(text, video, seed=1).similarity, made(text, video, seed=2).similarity, atol=1e-5)
    mean = head(perturbation="stp", trials="mean")
    assert torch.equal(mean(text, video, seed=1).similarity, mean(text, video, seed=2).similarity)


@torch.no_grad()
@pytest.mark.parametrize("fusion", FUSIONS[1:])
def test_the_gates_text_matters_off_the_diagonal_of_training(fusion):
    (text, video), draw = features(), torch.rand(N, D)
    query, paired = (head(fusion, gate_text=g).train_cosines(text, video, draw)[0] for g in ("query", "paired"))
    own = torch.eye(N, dtype=torch.bool)
    torch.testing.assert_close(query[own], paired[own], rtol=1e-4, atol=1e-6)
    assert ((query - paired).abs()[~own] > 1e-5).any()


@torch.no_grad()
@pytest.mark.parametrize("gate_text", ["query", "paired", "none"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_training_agrees_between_the_forms(fusion, gate_text):
    if fusion == "none":
        gate_text = None
    (text, video), draw = features(), torch.rand(N, D)
    forms = ["dense", "auto"] if fusion == "token" else ["dense", "factorised"]
    first, second = (head(fusion, form=f, gate_text=gate_text).train_cosines(text, video, draw) for f in forms)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def pairs_of(text, video):
    index = torch.arange(len(text))
    return PairedFeatures(text, video, index, index)


def test_both_branches_are_weighed_by_the_perturbed_similarities():
    (text, video), draw, scale = features(), torch.rand(N, D), torch.tensor(10.0)
    cosines = head().train_cosines(text, video, draw)
    weight = cosines[0].diagonal() / cosines[0].diagonal().sum()
    terms = head(loss_weighting="released").losses(pairs_of(text, video), scale, draw)
    torch.testing.assert_close(terms["perturbation"], info_nce(scale * cosines[0], weight=weight))
    torch.testing.assert_close(terms["support"], 0.8 * info_nce(scale * cosines[1], weight=weight))
    plain = head(loss_weighting="uniform", support_weight=0.1).losses(pairs_of(text, video), scale, draw)
    torch.testing.assert_close(plain["perturbation"], info_nce(scale * cosines[0]))
    torch.testing.assert_close(plain["support"], 0.1 * info_nce(scale * cosines[1]))
    default, weight = head().losses(pairs_of(text, video), scale, draw), pair_weights(cosines[0], "positive")
    torch.testing.assert_close(default["perturbation"], info_nce(scale * cosines[0], weight=weight))
    torch.testing.assert_close(default["support"], 0.8 * info_nce(scale * cosines[1], weight=weight))
    assert list(head(support_weight=0.0).losses(pairs_of(text, video), scale)) == ["perturbation"]
    assert list(head(perturbation="none").losses(pairs_of(text, video), scale)) == ["perturbation"]


def test_a_negative_similarity_never_rewards_a_bad_match():
    mixed = torch.diag(torch.tensor([0.6, -0.2, 0.2]))
    torch.testing.assert_close(pair_weights(mixed, "positive"), torch.tensor([0.75, 0.0, 0.25]))
    torch.testing.assert_close(pair_weights(mixed, "released"), torch.tensor([1.0, -1 / 3, 1 / 3]))
    torch.testing.assert_close(pair_weights(-torch.eye(4), "positive"), torch.full((4,), 0.25))
    assert pair_weights(mixed, "uniform") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusion": "none", "gate_text": "query"}, "gate_text: query conflicts with fusion: none"),
        ({"fusion": "none", "audio_encoder": TinyWhisperEncoder}, "audio_encoder conflicts with fusion: none"),
        ({"perturbation": "none", "prior": Prior()}, "prior conflicts with perturbation: none"),
        ({"perturbation": "none", "support_weight": 0.8}, "support_weight 0.8 conflicts with perturbation: none"),
        ({"trials": 5}, "trials 5 conflicts with perturbation: dasp"),
        ({"support_weight": -0.1}, "support_weight is -0.1"),
        ({"fusion": "token", "form": "factorised"}, "form: factorised conflicts with fusion: token"),
        ({"form": "factorised"}, "attention.dropout 0.3"),
        ({"memory_budget": 0}, "memory_budget is 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    if "audio_encoder" in options:
        options = {**options, "audio_encoder": TinyWhisperEncoder()}
    with pytest.raises(ValueError, match=message):
        model(**options)


def media(**sound):
    pixels = torch.zeros(2, F, 3, 16, 16, dtype=torch.uint8)
    video = Media(pixels, torch.ones(2, F, dtype=torch.bool), **sound)
    return VideoBatch(video, torch.arange(2), ["video0", "video1"])


def test_missing_sound_names_the_option_that_brings_it():
    made = model()
    assert isinstance(made.audio_encoder, TinyWhisperEncoder)
    with pytest.raises(ValueError, match=r"set data\.init_args\.audio to whisper"):
        made.video_features(media())
    frames = torch.randn(2, F, 64)
    with pytest.raises(ValueError, match=r"fusion: frame needs sound.*data\.init_args\.audio"):
        made.encode_video(VideoFeatures(frames, torch.ones(2, F, dtype=torch.bool)))
    deaf = model(fusion="none")
    assert deaf.audio_encoder is None
    assert deaf.video_features(media()).audio is None


def test_audio_is_brought_to_the_frames_width_and_silence_stays_zero():
    made = model(audio_encoder=TinyWhisperEncoder(width=32))
    frames, audio, mask = torch.randn(2, F, 64), torch.randn(2, F, 32), torch.ones(2, F, dtype=torch.bool)
    mask[1, 2:] = False
    video = made.encode_video(VideoFeatures(frames, mask | True, audio=audio, audio_mask=mask))
    assert video.audio.shape == (2, F, 64)
    torch.testing.assert_close(video.audio[mask], made.audio_projection(audio)[mask])
    assert not video.audio[~mask].any()
    assert model(audio_encoder=TinyWhisperEncoder(width=64)).audio_projection is None


def test_the_temperature_stays():
    made = model(fusion="none")
    assert not made.temperature.logit_scale.requires_grad


@pytest.mark.parametrize("gate_text", ["query", "paired", "none"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_ten_steps_lower_the_loss_and_reach_every_parameter(fusion, gate_text):
    options = {} if fusion == "none" else {"gate_text": gate_text}
    made = head(fusion, dropout=0.1, **options).train()
    text, video = features(8, 8)
    video.frames, video.audio = video.frames + text.sentence[:, None], video.audio + text.sentence[:, None]
    pairs, scale = pairs_of(text, video), torch.tensor(20.0)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = sum(made.losses(pairs, scale).values())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in made.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("fixture")
    for dataset in ("msrvtt", "vatex"):
        synthesize(dataset, root, 8, 0, workers=1, progress=False)
    return root


def recipe(root, *names):
    paths = [RECIPES / f"{name}.yaml" for name in ("gaid", *names, "fixture")]
    return from_recipe(paths, [f"--data.init_args.root={root}", "--data.init_args.num_workers=0"])


def test_the_recipe_is_the_released_method_with_a_clean_protocol(tiny_root):
    method, data = recipe(tiny_root)
    assert method.head.config == GAIDConfig()
    assert method.protocol == "query"
    assert data.sampling == "segment-centres"
    written = yaml.safe_load((RECIPES / "gaid.yaml").read_text(encoding="utf-8"))
    assert written["data"]["init_args"]["augmentation"] == "crop-flip"
    assert (data.audio.kind, data.audio.align, data.audio.seconds) == ("whisper", "duration", 30)


def test_overlays_change_what_their_headers_say(tiny_root):
    method, data = recipe(tiny_root, "variants/gaid-as-released")
    assert (method.protocol, method.head.config.gate_text, method.gather) == ("as-released", "paired", "none")
    assert data.audio.align == "clip30"
    config = recipe(tiny_root, "variants/gaid-paper")[0].head.config
    assert (config.prior, config.normalize_text, config.loss_weighting) == (Prior("normal"), True, "uniform")
    method, data = recipe(tiny_root, "data/vatex", "gaid-vatex")
    assert (method.head.config.support_weight, method.head.config.attention.dropout) == (0.4, 0.4)
    assert type(data).__name__ == "VATEX"
    assert [recipe(tiny_root, f"gaid-{name}")[0].head.config.support_weight for name in ("didemo", "lsmdc")] == [
        0.1,
        0.3,
    ]


def world(scenes, seed):
    """Texts that tell picture and sound, and videos of which every one has a twin that only sounds otherwise."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    turned = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(9))).Q
    picture, sound = normal(scenes, D).repeat(2, 1), normal(2 * scenes, D)
    mask = torch.ones(2 * scenes, F, dtype=torch.bool)
    frames = (picture.unsqueeze(1) + 0.3 * normal(scenes, F, D).repeat(2, 1, 1)) @ turned
    audio = (sound.unsqueeze(1) + 0.3 * normal(2 * scenes, F, D)) @ turned
    sentence = picture + sound
    text = TextFeatures(sentence, sentence[:, None], torch.ones(2 * scenes, 1, dtype=torch.bool))
    return text, VideoFeatures(frames, mask, audio=audio, audio_mask=mask)


def told_apart(fusion):
    """Train on some scenes; return the share of other videos that are ranked above their twin."""
    made = head(fusion, dropout=0.1).train()
    text, video = world(64, seed=1)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(60):
        rows = torch.randperm(len(text), generator=generator)[:32]
        loss = sum(made.losses(pairs_of(text[rows], video[rows]), torch.tensor(20.0)).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    text, video = world(32, seed=3)
    with torch.no_grad():
        similarity = made.eval()(text, video).similarity
    twin = similarity.roll(32, dims=1).diagonal()
    return float((similarity.diagonal() > twin + 1e-5).float().mean())


@pytest.mark.parametrize("fusion", FUSIONS[1:])
def test_sound_tells_apart_what_looks_the_same(fusion):
    assert told_apart(fusion) > 0.7


def test_without_sound_twins_are_alike():
    assert told_apart("none") == 0


@pytest.mark.slow
def test_the_recipe_learns_the_fixture(tmp_path):
    synthesize("msrvtt", tmp_path / "fixture", 500, 0, workers=2, progress=False)
    configs = [f"--config={RECIPES / name}" for name in ("gaid.yaml", "fixture.yaml")]
    options = [f"--data.init_args.root={tmp_path / 'fixture'}", f"--results.directory={tmp_path / 'runs'}"]
    # Mirrored clips contradict the fixture's captions, which tell left from right.
    options += ["--data.init_args.augmentation=none", "--trainer.accelerator=cpu"]
    assert main(["fit", *configs, *options]) == 0
    (path,) = (tmp_path / "runs").glob("*/*/results.json")
    results = json.loads(path.read_text())
    assert results["text_to_video"]["R@1"] >= 15 * 100 / results["videos"]
