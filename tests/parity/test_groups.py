"""Rates, decay, frozen layers, clipping and bound of the temperature, as our recipes set them and as released."""

import json
import re

import pytest
from parity.training import NAMES, RECIPES, family, recipe_of, tuning_of

from tvr_lightning.authors.names import openai_name, replace_prefix
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods.clip4clip import CLIP4ClipOptions, TightTransf
from tvr_lightning.training.checkpoints import find_class
from tvr_lightning.training.optim import OptimizerConfig, parameter_groups, schedule_factor

HEADERS = {"mean": MeanP, "lstm": SeqLSTM, "tight": TightTransf, "": SeqTransf}


def build(method):
    """Return a small method frozen as its recipe says."""
    name = family(method)
    header = HEADERS[method.partition("-")[2]]()
    options = {"clip4clip": CLIP4ClipOptions(similarity_header=header)} if name == "clip4clip" else {}
    encoder = TinyClipEncoder(64, text_layers=4, vision_layers=1)
    recipe = recipe_of(name)["model"]
    method = find_class(RECIPES, recipe["class_path"])
    return method(encoder, frames=2, words=8, tuning=tuning_of(recipe["init_args"]), **options)


def check(method, released):
    """Return a sentence for each difference."""
    recipe = recipe_of(family(method))
    config = OptimizerConfig(**recipe["model"]["init_args"]["optimizer"])
    module, names = build(method), NAMES[family(method)]
    parameters = dict(module.named_parameters())
    groups = {id(p): group for group in parameter_groups(module, config) for p in group["params"]}
    wrong, seen = [], set()
    for theirs, group in released["groups"].items():
        name = openai_name(re.sub(r"\.N\.", ".0.", theirs)).removeprefix("agent.")
        own = replace_prefix(name, names)
        useless = theirs in released["trained_without_gradient"]
        if own not in parameters:
            if not useless:
                wrong.append(f"{theirs} is not ours")
            continue
        seen.add(own)
        ours = groups.get(id(parameters[own]))
        if (ours is not None) != group["trained"] and not useless:
            wrong.append(f"{theirs} is {'trained' if ours else 'frozen'}")
        for option in ("lr", "weight_decay"):
            if ours is not None and ours[option] != pytest.approx(group[option]):
                wrong.append(f"{theirs} has {option} {ours[option]}")
    layers = {re.sub(r"resblocks\.\d+\.", "resblocks.0.", name) for name, p in parameters.items() if p.requires_grad}
    wrong += [f"{name} is not released" for name in sorted(layers - seen) if not name.startswith("audio")]
    for rates in released["rates"]:
        for part, peak in (("clip", config.encoder_lr), ("rest", config.lr)):
            for step, rate in rates[part].items():
                ours = peak * schedule_factor(config, int(step), rates["total_steps"])
                if ours != pytest.approx(rate, rel=1e-12, abs=0):
                    wrong.append(f"rate {ours} in step {step} of {rates['total_steps']}, released {rate}")
    given = {
        "betas": list(config.betas), "eps": config.eps, "max_grad_norm_per_tensor": config.per_tensor_clip,
        "clip_all_gradients_to_norm": recipe["trainer"]["gradient_clip_val"],
    }  # fmt: skip
    wrong += [f"{key} is {value}" for key, value in given.items() if value != released.get(key)]
    if module.temperature.maximum != pytest.approx(released["logit_scale"]["bound"]):
        wrong.append(f"the bound of logit_scale is {module.temperature.maximum}")
    settings = released["msrvtt"]
    ours = (recipe["trainer"]["max_epochs"], recipe["data"]["init_args"]["batch_size"], recipe["seed_everything"])
    if ours != (settings["epochs"], settings["batch_size"], settings["seed"]):
        wrong.append(f"epochs, batch size and seed are {ours}")
    precision = recipe["model"]["init_args"]["encoder"]["init_args"].get("encoder_precision", "float32")
    if (precision == "float16") != bool(released["precision"].get("float16")):
        wrong.append(f"encoder_precision is {precision}")
    return wrong


def test_groups(groups_case):
    found = {}
    for method, released in json.loads(groups_case.read_text(encoding="utf-8"))["methods"].items():
        if "rates" in released:
            found[method] = check(method, released)
            print(f"{groups_case.name}: {method}, {len(released['groups'])} groups, {len(found[method])} differ")
    assert found
    assert not any(found.values()), {method: sentences[:6] for method, sentences in found.items()}
