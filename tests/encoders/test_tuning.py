"""Tuning: trained weights of the encoder and their learning rates, for every method."""

import copy
import re
from typing import get_args

import pytest
import torch
from encoders.parts import patterns, random_media
from small_run import small_run
from small_towers import CAPTIONS, KINDS

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.encoders import (
    Adapter,
    ClipEncoder,
    Encoder,
    FineTuning,
    Frozen,
    LastBlocks,
    LoRA,
    TinyClipEncoder,
    Tuning,
)
from tvr_lightning.encoders.tuning import FROM_THE_BLOCKS_ON, Target
from tvr_lightning.errors import UserError
from tvr_lightning.methods import XPool
from tvr_lightning.testing import run_processes
from tvr_lightning.testing.processes import STEPS, Batches, comparable, strategies
from tvr_lightning.testing.processes import trained as trained_on
from tvr_lightning.testing.small import method_recipes, random_pairs, small, synthetic_data
from tvr_lightning.training.checkpoints import CheckpointError
from tvr_lightning.training.optim import OptimizerConfig, parameter_groups

METHODS = method_recipes(RECIPES)
SMALL = "--model.init_args.encoder.init_args.width=64"
OVERLAYS = {path.stem: f"--config={path}" for path in sorted((RECIPES / "tuning").glob("*.yaml"))}
del OVERLAYS["tempme"]  # for towers of at least 11 blocks (test_vision_towers.py)


def method(tuning: Tuning | None, **options: object) -> XPool:
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=4, vision_layers=4, **options)
    return XPool(encoder, tuning=tuning, frames=4, words=12)


def trained(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def rates(tuning: Tuning | None) -> dict[str, float]:
    groups = parameter_groups(method(tuning), OptimizerConfig(lr=1.0, encoder_lr=0.1))
    return {group["name"].partition(",")[0]: group["lr"] for group in groups}


def test_fine_tuning_trains_the_matching_weights():
    everything = {name for name, _ in method(None).encoder.named_parameters()}
    assert trained(method(None).encoder) == trained(method(FineTuning()).encoder) == everything
    assert trained(method(patterns("gare")).encoder) == everything - {"clip.visual.conv1.weight"}
    visual = ("class_embedding", "positional_embedding", "conv1.weight", "ln_pre.weight", "ln_pre.bias")
    frozen = {"clip.positional_embedding", "clip.token_embedding.weight", *(f"clip.visual.{name}" for name in visual)}
    assert everything - trained(method(patterns("clip4clip")).encoder) == frozen
    norms = {f"clip.visual.{name}.weight" for name in ("ln_pre", "ln_post")}
    assert trained(method(FineTuning(["clip.visual.ln_*", "!*bias"])).encoder) == norms
    assert trained(method(FineTuning([])).encoder) == trained(method(Frozen()).encoder) == set()
    assert trained(method(Frozen())) == {n for n in trained(method(None)) if not n.startswith("encoder.")}
    assert rates(FineTuning()) == {"method": 1.0, "encoder": 0.1}
    bitfit = patterns("tuning/bitfit")
    assert trained(method(bitfit).encoder) == {name for name in everything if name.endswith("bias")}
    assert rates(bitfit) == {"method": 1.0, "encoder": 0.1, "tuning": 1.0}  # encoder: the logit scale
    for name in ("clip4clip", "ncl", "tcmgc", "ucofia", "xclip"):
        assert tuple(patterns(name).train) == FROM_THE_BLOCKS_ON


@pytest.mark.parametrize("blocks", [1, 3, 9])
def test_last_blocks_trains_the_last_blocks_of_each_tower(blocks):
    found, allowed = trained(method(LastBlocks(blocks)).encoder), trained(method(patterns("clip4clip")).encoder)
    for tower in ("clip.transformer", "clip.visual.transformer"):
        first = {n for n in allowed for i in range(4 - blocks) if n.startswith(f"{tower}.resblocks.{i}.")}
        assert len(first) == 12 * max(4 - blocks, 0)
        allowed -= first
    assert found == allowed
    assert {"clip.ln_final.weight", "clip.text_projection", "clip.visual.proj"} <= found
    assert rates(LastBlocks(blocks)) == {"method": 1.0, "encoder": 0.1}


def changes(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that LoRA or Adapter trains in an encoder, after moving those that start at zero."""
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in found.items():
            if name.endswith((".up", ".up.weight")):
                parameter.normal_(std=0.5)
    return found


ONE = 4 * (64 + 64) * 8  # LoRA of one target in the four blocks of a tower: A and B of rank 8


@pytest.mark.parametrize(
    ("tuning", "parameters"),
    [
        (LoRA(), 4 * ONE),
        (LoRA(rank=2), ONE),
        (LoRA(towers=["text", "text"]), 2 * ONE),
        (LoRA(targets=["key"]), 2 * ONE),
        (LoRA(targets=["query", "key", "value", "output"]), 8 * ONE),
        (LoRA(targets=["mlp"]), 2 * 4 * 2 * (64 + 256) * 8),
        (Adapter(bottleneck=8), 8 * (2 * 64 * 8 + 8 + 64)),
        (Adapter(bottleneck=1, towers=["text"]), 4 * (2 * 64 + 1 + 64)),
    ],
)
def test_lora_and_adapters_add_parameters(tuning, parameters):
    assert sum(parameter.numel() for parameter in changes(method(tuning).encoder).values()) == parameters
    assert rates(tuning) == {"method": 1.0, "encoder": 0.1, "tuning": 1.0}


@pytest.mark.parametrize("target", ["query", "value"])
def test_lora_of_a_fused_weight_changes_only_the_rows_of_its_target(target):
    tunings = (None, LoRA(targets=[target], alpha=4.0))
    plain, tuned = (method(tuning).encoder.blocks("video")[1].attn for tuning in tunings)
    down, up = (parameter[0] for parameter in changes(tuned).values())
    expected = plain.in_proj_weight.detach().clone().view(3, 64, 64)
    expected[["query", "key", "value"].index(target)] += 4.0 / 8 * up @ down
    torch.testing.assert_close(tuned.in_proj_weight.view(3, 64, 64), expected)


@pytest.mark.parametrize("tuning", [LoRA(), Adapter()], ids=repr)
def test_tuning_of_float16_weights_is_in_float32(tuning):
    encoder = method(tuning, encoder_precision="float16").encoder
    found = changes(encoder)
    encoder.encode_text(["a cat"], 12).sentence.sum().backward()
    assert encoder.blocks("text")[0].attn.in_proj_weight.dtype == torch.float16
    assert {parameter.dtype for parameter in found.values()} == {torch.float32}
    assert all(p.grad.abs().sum() > 0 for name, p in found.items() if ".transformer" in name and "visual" not in name)


@pytest.mark.parametrize("tuning", [LoRA(dropout=0.5), Adapter()], ids=repr)
def test_copies_and_checkpoints_encode_equally_and_dropout_applies_in_training_only(tuning):
    module = method(tuning)
    plain, tuned = (each.encoder.temporal_initialization(2) for each in (method(None), module))
    for mine, other in zip(tuned.blocks, plain.blocks, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    changes(module.encoder)
    other = method(tuning)
    other.load_state_dict(module.state_dict())
    encoders = [each.encoder.eval() for each in (module, copy.deepcopy(module), other)]
    first, *others = (encoder.encode_text(["a cat"], 12).sentence for encoder in encoders)
    assert all(torch.equal(first, sentence) for sentence in others)
    assert module.encoder.fingerprint() == other.encoder.fingerprint()
    first, second = (encoders[0].train().encode_text(["a cat"], 12).sentence for _ in range(2))
    assert torch.equal(first, second) == isinstance(tuning, Adapter)
    assert method(LoRA(alpha=1.0)).encoder.fingerprint() != method(LoRA(alpha=2.0)).encoder.fingerprint()


ALL = LoRA(targets=get_args(Target))
REFUSED = {
    "resnet": "the video tower .* has no transformer blocks",
    "convnext": "the video tower .* has no linear layer for query",
    "mobileclip": "the video tower .* has no linear layer for mlp",
}
WITHOUT_MLP = dict.fromkeys(["mobileclip", "swin", "bert", "xlm-roberta", "mt5", "nllb"], "have no MLP")


@pytest.mark.parametrize(
    ("tuning", "kind", "refused"),
    [(ALL, kind, REFUSED.get(kind)) for kind in KINDS]
    + [(LoRA(), "mobileclip", None)]
    + [
        pytest.param(Adapter(), kind, {"resnet": REFUSED["resnet"], **WITHOUT_MLP}.get(kind), marks=mark)
        for kind in KINDS
        for mark in [() if kind in ("clip", "resnet", "bert") else pytest.mark.slow]
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Tuning) else value or "",
)
def test_tuning_changes_both_towers_or_is_refused(tuning, kind, refused, models):
    encoder = ClipEncoder(models(kind), "folder").eval()
    if refused:
        with pytest.raises(UserError, match=refused):
            tuning.apply(encoder)
        return
    encoder.requires_grad_(False)  # kernels round differently if a gradient is needed
    text, video = encoder.encode_text(CAPTIONS, 12), random_media(encoder.image_size)
    frames = encoder.encode_video(video).frames
    tuning.apply(encoder)
    with torch.no_grad():
        assert torch.equal(encoder.encode_text(CAPTIONS, 12).words, text.words)
        assert torch.equal(encoder.encode_video(video).frames, frames)
    changes(encoder)
    assert not torch.allclose(encoder.encode_text(CAPTIONS, 12).words, text.words)
    assert not torch.allclose(encoder.encode_video(video).frames, frames)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (lambda: Encoder.blocks(method(None).encoder, "text"), "TinyClipEncoder names no transformer blocks"),
        (lambda: method(FineTuning(["visual.*"])),
         r"no parameter of TinyClipEncoder matches visual\.\*\. Its .* include clip\."),
        (lambda: LoRA(targets=["queries"]), "LoRA.targets is 'queries'; expected query, key, value, output, or mlp"),
        (lambda: LoRA(towers=[]), "LoRA.targets and LoRA.towers must not be empty"),
        (lambda: Adapter(bottleneck=0), "Adapter.bottleneck is 0; expected"),
        (lambda: Adapter(towers=[]), "Adapter.towers must not be empty"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(tuning, message):
    with pytest.raises(UserError, match=message):
        tuning()


def test_the_features_overlay_freezes_the_encoder_and_the_frames():
    built = Recipe.parse(["xpool", "fixture", "features"], [SMALL]).build()
    assert trained(built.model.encoder) == set() != trained(built.model)
    options = [built.data.hparams[name] for name in ("features", "augmentation", "train_sampling")]
    assert options == ["features", "none", None]


def test_tuning_of_stored_features_is_refused(monkeypatch):
    monkeypatch.delenv("TVR_DATA", raising=False)
    features = f"--config={RECIPES / 'features.yaml'}"
    with pytest.raises(UserError, match=r"tuning LoRA trains the encoder, whose features in features are fixed\."):
        Recipe.parse([RECIPES / "xpool.yaml"], [features, OVERLAYS["lora"]]).check()
    with pytest.raises(UserError, match="environment variable TVR_DATA is set"):  # the next check
        Recipe.parse([RECIPES / "xpool.yaml"], [features, OVERLAYS["frozen"]]).check()


def test_a_run_with_lora_reports_its_parameters_and_keeps_the_options_of_its_scores(msrvtt, tmp_path, capsys):
    options = small_run(msrvtt, tmp_path, "--config=tuning/lora", "--trainer.max_epochs=1")
    assert main(["fit", *options, "--estimate"]) == 0
    assert main(["fit", *options]) == 0
    shown = capsys.readouterr().out
    parameters = re.search(r"parameters: ([\d.]+) million trained, ([\d.]+) million frozen", shown)
    assert 0 < float(parameters[1]) < float(parameters[2])
    assert f"; {parameters[1]} M trainable and {parameters[2]} M frozen parameters, untrained: " in shown
    checkpoint = tmp_path / "clip4clip-msrvtt" / "version_0" / "checkpoints" / "last.ckpt"
    with pytest.raises(CheckpointError, match="given ones change its scores"):
        Recipe.parse([], ["--model.init_args.tuning.init_args.alpha=1"], checkpoint)


def encoded(module, pairs) -> tuple[torch.Tensor, ...]:
    found = module.pair_features(pairs)
    return found.text.sentence, found.video.frames, module.score(found.text, found.video).similarity


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("title", [t if t == "XPool" else pytest.param(t, marks=pytest.mark.slow) for t in METHODS])
def test_one_step_with_an_overlay_changes_only_the_weights_that_it_trains(title, name):
    (plain, _), (tuned, _) = small(METHODS[title]), small(METHODS[title], OVERLAYS[name])
    pairs = random_pairs(tuned, 4)
    with torch.no_grad():
        for mine, other in zip(encoded(tuned.eval(), pairs), encoded(plain.eval(), pairs), strict=True):
            assert torch.equal(mine, other)
    tuned.train()
    before = {name: parameter.detach().clone() for name, parameter in tuned.named_parameters()}
    torch.stack([*tuned.losses(tuned.pair_features(pairs)).values()]).sum().backward()
    optimizer = torch.optim.SGD(parameter_groups(tuned, OptimizerConfig(lr=1.0, encoder_lr=1.0)))
    optimizer.step()
    changed = {name for name, parameter in tuned.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed <= trained(tuned)
    if name != "frozen":
        assert any(name.startswith("encoder.") for name in changed)


def test_question_answering_can_be_tuned():
    recipes = ["dpdv-vqa", "fixture", "fixture-vqa"]
    model = Recipe.parse(recipes, [OVERLAYS["lora"], SMALL]).build().model
    groups = parameter_groups(model, OptimizerConfig(lr=1.0, encoder_lr=0.1))
    assert {g["name"]: g["lr"] for g in groups}["tuning, decayed"] == 1.0
    assert all("parametrizations" in name for name in trained(model.encoder))
    with pytest.raises(UserError, match=r"method\.init_args has tuning, which question answering does not use"):
        Recipe.parse(recipes, ["--model.init_args.method.init_args.tuning=LoRA", SMALL]).build()


DISTRIBUTED = ("lora", "adapter")


def train_two_steps(rank: int, world: int, data: str) -> dict[str, list]:
    """Losses and weights of training with each overlay in one process, or with each strategy in several."""
    found = {}
    for overlay in DISTRIBUTED:
        for name, strategy in (strategies() if world > 1 else {"alone": "auto"}).items():
            module = comparable(small(RECIPES / "xpool.yaml", OVERLAYS[overlay], root=data)[0])
            changes(module.encoder)
            found[f"{overlay} {name}"] = list(trained_on(module, Batches(module, STEPS), strategy=strategy))
    return found


@pytest.mark.slow
def test_two_processes_train_lora_and_adapters_like_one():
    data = synthetic_data()
    alone = train_two_steps(0, 1, data)
    for found in run_processes(train_two_steps, 2, 2, data):
        for overlay in DISTRIBUTED:
            losses, weights = alone[f"{overlay} alone"]
            for strategy in ("ddp", "fsdp2"):
                assert found[f"{overlay} {strategy}"][0] == pytest.approx(losses)
                torch.testing.assert_close(found[f"{overlay} {strategy}"][1], weights, rtol=1e-6, atol=1e-9)
