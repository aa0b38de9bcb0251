"""Methods with an authors' weights and their inputs, trained as our recipes train."""

import dataclasses
from pathlib import Path

import open_clip
import torch
from torch import nn

from tvr_lightning.authors.convert import clip_configuration, import_checkpoint, similarity_header
from tvr_lightning.authors.families import FAMILIES
from tvr_lightning.authors.names import load, replace_prefix, with_openai_names
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.data.batch import AudioInput, Media, PairBatch, TextBatch, Tokens, VideoBatch
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.clip import SizedClipEncoder
from tvr_lightning.encoders.tuning import FineTuning
from tvr_lightning.layers.stochastic import Normal
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.methods.clip4clip import CLIP4Clip, CLIP4ClipOptions
from tvr_lightning.training.optim import OptimizerConfig

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = {family.name: family.rules for family in FAMILIES}
"""Rules from the authors' names (CLIP's as OpenAI's) to ours, by method."""


class GivenAudio(AudioEncoder):
    """Audio features (M, 1, T, D) as the released loaders read them, averaged to F frames as in the released model."""

    kind = "whisper"

    def __init__(self, dimension):
        super().__init__()
        self.dimension = dimension

    def encode_input(self, audio):
        return nn.functional.adaptive_avg_pool1d(audio.values.squeeze(1).mT, audio.windows.shape[1]).mT

    def configuration(self):
        return {}


def recipe_of(method):
    return read_recipe(RECIPES / f"{method}.yaml")


def family(method):
    """Return the method of a case such as `clip4clip-lstm` or `clip4clip_float16`."""
    return method.removesuffix("_float16").partition("-")[0]


def tuning_of(options):
    """Return the tuning in the options of a recipe's method."""
    return FineTuning(**options.get("tuning", {}).get("init_args", {}))


def import_case(method, tensors, config, path):
    """Build the method of a case with its checkpoint, without dropout, frozen and optimized as its recipe says.

    Weights are float64, unless the case is of float16.
    """
    name, half = family(method), method.endswith("_float16")
    checkpoint = {key: tensor.float() for key, tensor in part_of(tensors, "checkpoint.").items()}
    checkpoint = {key: tensor for key, tensor in checkpoint.items() if not key.startswith("agent.")}
    words, frames = tensors["input.input_ids"].shape[-1], tensors["input.video_mask"].shape[-1]
    options = {"audio_encoder": GivenAudio(tensors["input.audio"].shape[-1])} if "input.audio" in tensors else {}
    module = import_checkpoint(checkpoint, str(path), words, frames, name, **options)
    if half:  # CLIP's matrices in float16
        encoder = SizedClipEncoder(clip_configuration(checkpoint), encoder_precision="float16")
        header = similarity_header(checkpoint)
        module = CLIP4Clip(encoder, words=words, frames=frames, clip4clip=CLIP4ClipOptions(similarity_header=header))
        unused = {} if isinstance(header, SeqTransf) else {"frame_position_embeddings.": None}
        load(module, checkpoint, NAMES[name] | unused, str(path))
    recipe = recipe_of(name)["model"]["init_args"]
    tuning_of(recipe).apply(module.encoder)
    module.optimizer_config = OptimizerConfig(**recipe["optimizer"])
    for part in module.modules():
        for attribute in ("dropout", "pair_dropout"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    if config.get("stochastic_prior_std") == 0:
        options = module.options if name == "tmass" else module.options.perturbation
        options.prior = Normal(1e-300)
        options.support_weight = config["support_loss_weight"]
    if "cdcr" in config:
        assert config["cdcr"] == 3
        decorrelation = module.options.decorrelation
        decorrelation.tokens, decorrelation.weight = "weighted", config["cdcr_lambda"]
        decorrelation.on_diagonal, decorrelation.off_diagonal = config["cdcr_alpha1"], config["cdcr_alpha2"]
    if not half:
        module.double()  # and the constants of the normalization, which float32 rounds
        for kind, values in (("mean", open_clip.OPENAI_DATASET_MEAN), ("std", open_clip.OPENAI_DATASET_STD)):
            setattr(module.encoder, f"pixel_{kind}", torch.tensor(values, dtype=torch.float64).view(3, 1, 1))
    return module


def part_of(tensors, prefix):
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def released_names(tensors, names, ours):
    """Return our tensors under the authors' names and in their layout; those that the authors never use are left out.

    Args:
        tensors: Tensors of the case, for names and shapes.
        names: Map from the authors' names (CLIP's as OpenAI's) to ours.
        ours: State of our module.
    """
    places, count = {}, 0
    for key, tensor in part_of(tensors, "checkpoint.").items():
        places[key] = torch.arange(count, count + tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
        count += tensor.numel()
    values = torch.full((count,), torch.nan, dtype=torch.float64)
    for name, numbers in with_openai_names(places, "the case").items():
        own = replace_prefix(name.removeprefix("agent."), names)  # the released GARE registers its psi twice
        if own in ours:
            values[numbers.long().flatten()] = ours[own].detach().double().flatten()
    found = {name: values[numbers.long()] for name, numbers in places.items()}
    return {name: tensor for name, tensor in found.items() if not tensor.isnan().any()}


def media_of(pixels, mask, audio=None):
    """Return media of M videos from pixels (M, F, 3, S, S) and mask (M, F); audio is (M, 1, T, D_a)."""
    media = Media(pixels, mask.bool())
    if audio is None:
        return media
    steps = torch.ones(len(audio), dtype=torch.int64)
    windows = torch.stack([torch.zeros_like(mask), torch.ones_like(mask)], -1).long()
    return dataclasses.replace(media, audio=AudioInput(audio, steps, steps, windows, steps.tolist()))


def batches_of(tensors):
    """Return the batches of a case of training steps."""
    given = part_of(tensors, "input.")
    for step, ids in enumerate(given["input_ids"]):
        index, blank = torch.arange(len(ids)), [""] * len(ids)
        text = Tokens(blank, ids.long(), given["text_mask"][step].bool(), [1] * len(ids))
        audio = given["audio"][step] if "audio" in given else None
        media = media_of(given["pixels"][step], given["video_mask"][step], audio)
        yield PairBatch(TextBatch(text, index), VideoBatch(media, index, blank))
