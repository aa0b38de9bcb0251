"""`tvr convert`: conversion of an authors' checkpoint for `tvr test --ckpt_path` and `tvr_lightning.load`."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from tvr_lightning import __version__, encoders
from tvr_lightning.authors.families import FAMILIES, Family
from tvr_lightning.authors.names import SHIFTED, load, replace_prefix, with_openai_names
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.clip import SizedClipEncoder, openai_configuration
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.encoders.weights import read_tensors
from tvr_lightning.encoders.whisper import TinyWhisperEncoder
from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf, SimilarityHeader
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import TightTransf
from tvr_lightning.methods.gaid.method import AUDIO, GAID
from tvr_lightning.methods.ucofia import UCoFiA
from tvr_lightning.training.checkpoints import CONVERTED, RECORD, check_target, write_checkpoint

RECIPE_ARCHITECTURES = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336")
RELEASED_AUDIO: Mapping[int, dict[str, Any]] = {
    512: {"class_path": "WhisperEncoder", "init_args": {"size": "base", "weights": "openai"}},
    768: {"class_path": "Wav2Vec2Encoder", "init_args": {"size": "base", "weights": "facebook"}},
}
"""`audio_encoder:` sections of a recipe by the width of the features."""


def family_of(checkpoint: Iterable[str], source: str, method: str | None = None) -> Family:
    """Return the family of a checkpoint, given by the authors' names of its tensors.

    Raises:
        UserError: The names belong to an unknown method, or to another one than `method`.
    """
    known = {family.name: family for family in FAMILIES}
    if method is not None and method not in known:
        raise UserError(f"The method {method!r} is not supported. Available: {', '.join(sorted(known))}")
    names = list(checkpoint)
    found = next(
        (family for family in FAMILIES if all(any(n.startswith(mark) for n in names) for mark in family.marks)), None
    )
    if found is None:
        raise UserError(f"{source}: no known method has these tensors: {abbreviated(sorted(names), 20)}")
    if method not in (None, found.name):
        raise UserError(
            f"{source} is a checkpoint of {found.title}, not of {known[method].title}. Convert it with --method "
            f"{found.name}"
        )
    return found


def clip_configuration(checkpoint: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the configuration of the CLIP in a checkpoint, as an argument of `SizedClipEncoder`."""
    clip = {name.removeprefix("clip."): tensor for name, tensor in checkpoint.items() if name.startswith("clip.")}
    return openai_configuration(clip)


def similarity_header(checkpoint: Mapping[str, Tensor]) -> SimilarityHeader:
    """Return the temporal encoder of a checkpoint, with its number of layers."""

    def blocks(prefix: str) -> int:
        return len({name.removeprefix(prefix).split(".")[0] for name in checkpoint if name.startswith(prefix)})

    if tight := blocks("cross.transformer.resblocks."):
        return TightTransf(tight)
    if sequential := blocks("transformerClip.resblocks."):
        return SeqTransf(sequential)
    if layers := blocks("lstm_visual.weight_ih_l"):
        return SeqLSTM(layers)
    return MeanP()


def fixed_sizes(checkpoint: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the numbers of words W and frames F that the shapes determine, by name."""
    sizes = {}
    if "word_mat_weight" in checkpoint:
        sizes["words"] = len(checkpoint["word_mat_weight"])
    if "frame_logit_weight" in checkpoint:
        sizes["frames"] = len(checkpoint["frame_logit_weight"])
    if "stochastic.std_branch.linear_proj.weight" in checkpoint:  # from F similarities to the radius of T-MASS
        sizes["frames"] = checkpoint["stochastic.std_branch.linear_proj.weight"].shape[1]
    return sizes


def check_sizes(
    checkpoint: Mapping[str, Tensor], source: str, words: int, frames: int, header: SimilarityHeader
) -> None:
    """Refuse numbers of words and frames that do not fit the matrices or exceed the positions of a checkpoint."""
    fixed, wanted = fixed_sizes(checkpoint), {"words": words, "frames": frames}
    if any(wanted[name] != size for name, size in fixed.items()):
        expected, given = (" and ".join(f"{sizes[name]} {name}" for name in fixed) for sizes in (fixed, wanted))
        arguments = " ".join(f"--{name} {size}" for name, size in fixed.items())
        raise UserError(f"{source}: its tensors are for {expected}, not for {given}. Pass {arguments}")
    # In TightTransf, the sentence comes before the frames.
    tokens = frames + 1 if isinstance(header, TightTransf) else frames if isinstance(header, SeqTransf) else 0
    positions = len(checkpoint["clip.positional_embedding"]) if "clip.positional_embedding" in checkpoint else tokens
    if max(words, tokens) > positions:
        raise UserError(
            f"{source}: {words} words and {frames} frames do not fit; the checkpoint has positions for "
            f"{positions} words" + (f" and {positions - tokens + frames} frames" if tokens else "")
        )


def without_agent(checkpoint: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return a checkpoint of GARE without psi's second names `agent.psi.*`, which must have the same tensors."""
    twins = {name: checkpoint.get(name.removeprefix("agent.")) for name in checkpoint if name.startswith("agent.psi.")}
    other = [name for name, twin in twins.items() if twin is None or not torch.equal(twin, checkpoint[name])]
    if other:
        raise UserError(
            f"{source}: these tensors differ from those without 'agent.', although the released code saves one tensor "
            f"under both names: {abbreviated(sorted(other), 20)}"
        )
    return {name: tensor for name, tensor in checkpoint.items() if name not in twins}


def without_net(checkpoint: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return a checkpoint with CLIP's names for the attentions of UCoFiA's patch shift."""
    renamed = {str(replace_prefix(name, SHIFTED)): tensor for name, tensor in checkpoint.items()}
    if len(renamed) < len(checkpoint):
        plain = [name for name in checkpoint if name.startswith(tuple(SHIFTED.values())) and ".net." not in name]
        names = abbreviated(sorted(plain), 20)
        raise UserError(f"{source}: unexpected tensors in addition to the patch shift's attn.net.*: {names}")
    return renamed


def with_openai_attention(
    checkpoint: Mapping[str, Tensor], openai: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Return a checkpoint of UCoFiA with OpenAI's attention in the shifted blocks, as in its released evaluation."""
    attention = [name for name in checkpoint if name.startswith(tuple(SHIFTED.values()))]
    missing = [name for name in attention if name.removeprefix("clip.") not in openai]
    if missing:
        raise UserError(
            f"{source}: OpenAI's CLIP has no {abbreviated(sorted(missing), 20)}. Name the file of OpenAI's weights."
        )
    return {**checkpoint, **{name: openai[name.removeprefix("clip.")] for name in attention}}


def import_checkpoint(
    checkpoint: Mapping[str, Tensor],
    source: str,
    words: int = 32,
    frames: int = 12,
    method: str | None = None,
    options: Any = None,
    audio_encoder: AudioEncoder | None = None,
    openai: Mapping[str, Tensor] | None = None,
) -> RetrievalModule:
    """Build a method with the weights of an authors' checkpoint; names and shapes determine its sizes.

    Args:
        checkpoint: Tensors by the authors' names, CLIP's by OpenAI's or transformers' names.
        source: Name of the file, for errors.
        words: Text positions W of the method.
        frames: Number of frames F of the method.
        method: Method that the checkpoint must belong to, as on the command line; None for any.
        options: Options of the method that the checkpoint does not determine. Default: those of the released training.
        audio_encoder: Encoder of the audio features that GAID was trained on. Default: a random one of the same width.
        openai: OpenAI's CLIP, to evaluate UCoFiA as in its released evaluation: with OpenAI's attention in the shifted
            vision blocks, without L1, and with noise in the patch selector.

    Raises:
        UserError: The method, names, words or frames do not match the checkpoint.
    """
    family = family_of(checkpoint, source, method)
    if openai is not None and family.method is not UCoFiA:
        raise UserError(f"{source}: --openai_clip is only for UCoFiA. Omit it for {family.name}.")
    tensors = without_net(without_agent(with_openai_names(checkpoint, source), source), source)
    patch_shift = any(name.startswith(tuple(SHIFTED)) for name in checkpoint)
    header = similarity_header(tensors)
    check_sizes(tensors, source, words, frames, header)
    try:
        encoder = SizedClipEncoder(clip_configuration(tensors), text_mask=family.text_mask, patch_shift=patch_shift)
        options = dataclasses.replace(options or family.options(), **family.found(tensors, header, words))
        if openai is not None:
            tensors = with_openai_attention(tensors, openai, source)
            selection = dataclasses.replace(options.patch_selection, noise_eval=True)
            options = dataclasses.replace(options, patch_selection=selection, patch_matrix=False)
        arguments = {family.name: options}
        if family.method is GAID:  # authors' checkpoints do not contain the audio encoder
            width = tensors["linear.weight"].shape[1] if "linear.weight" in tensors else encoder.dimension
            arguments["audio_encoder"] = audio_encoder or TinyWhisperEncoder(width)
        module = family.method(encoder, words=words, frames=frames, **arguments)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    # Released code creates the position embeddings with every temporal encoder, and L1 with every predictor.
    unused = {} if isinstance(header, SeqTransf) else {"frame_position_embeddings.": None}
    unused |= {} if getattr(options, "patch_matrix", True) else {"local_mat_weight1": None}
    return load(module, tensors, family.rules | unused, source)


def released_recipe(family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data and model options of a method's released evaluation on MSR-VTT.

    A converted file records them, so options for reading videos and captions as in the released code belong in these
    recipes.
    """
    recipes = [read_recipe(family.name)]
    if family.leaks:
        recipes.append(read_recipe(f"variants/{family.name}-as-released"))
    data: dict[str, Any] = {"_class_path": f"tvr_lightning.data.{recipes[0]['data']['class_path']}"}
    model: dict[str, Any] = {}
    for recipe in recipes:
        data |= (recipe.get("data") or {}).get("init_args") or {}
        model |= recipe["model"]["init_args"]
    return data, model


def encoder_section(configuration: dict[str, Any], switches: dict[str, bool]) -> dict[str, Any]:
    """Return the `encoder:` section of a recipe for a CLIP with this configuration.

    OpenAI's architectures have the same name as in recipes, with the weights that the authors started from. Other
    sizes are written explicitly.
    """
    for name in RECIPE_ARCHITECTURES:
        known = model_configuration(name)
        towers = (known[tower].items() <= configuration[tower].items() for tower in ("vision_cfg", "text_cfg"))
        if known["embed_dim"] == configuration["embed_dim"] and all(towers):
            return {"class_path": "ClipEncoder", "init_args": {"architecture": name, "weights": "openai", **switches}}
    return {"class_path": "SizedClipEncoder", "init_args": {"configuration": configuration, **switches}}


def model_options(module: RetrievalModule, checkpoint: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options that build a method imported from a checkpoint, as in a recipe."""
    encoder: Any = module.encoder
    switches = {"text_mask": encoder.text_mask, "patch_shift": encoder.patch_shift is not None}
    options = {name: value for name, value in module.hparams.items() if value is not None}
    options["encoder"] = encoder_section(clip_configuration(checkpoint), switches)
    options["_class_path"] = f"{type(module).__module__}.{type(module).__qualname__}"
    if isinstance(module, GAID) and module.audio_encoder is not None:
        width = module.audio_encoder.dimension
        random = {"class_path": "TinyWhisperEncoder", "init_args": {"width": width, "seed": 0}}
        options["audio_encoder"] = RELEASED_AUDIO.get(width, random)
    return options


def convert(
    source: Path,
    out: Path,
    words: int | None = None,
    frames: int | None = None,
    method: str | None = None,
    openai_clip: Path | None = None,
) -> tuple[RetrievalModule, list[str]]:
    """Convert an authors' checkpoint to a Lightning checkpoint, and return the method and lines that describe it.

    The file also records the released evaluation. It contains only plain tensors, strings and numbers, so that it loads
    with `weights_only=True`. Float16 tensors become float32, the precision of the evaluation. Arguments are those of
    `tvr convert`.

    Raises:
        UserError: `out` is one of the files read, the file is unreadable or belongs to another method, its names or
            sizes do not fit, or `openai_clip` is given for another method than UCoFiA.
    """
    check_target(out, source, openai_clip)
    checkpoint = with_openai_names(read_tensors(source), str(source))
    family = family_of(checkpoint, str(source), method)
    data, recipe = released_recipe(family)
    positions = len(checkpoint.get("clip.positional_embedding", range(data["words"])))
    sizes = {"words": min(data["words"], positions), "frames": data["frames"]} | fixed_sizes(checkpoint)
    openai = None if openai_clip is None else read_tensors(openai_clip)
    words, frames = words or sizes["words"], frames or sizes["frames"]
    module = import_checkpoint(checkpoint, str(source), words, frames, openai=openai)
    model = model_options(module, checkpoint)
    model |= {name: recipe[name] for name in ("protocol",) if name in recipe}
    data |= {"words": module.words, "frames": module.frames}
    if model.get("audio_encoder") == RELEASED_AUDIO[768]:
        data |= read_recipe("backbone/wav2vec2-base")["data"]["init_args"]
    content = {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "state_dict": {
            name: tensor.detach().clone()
            for name, tensor in module.state_dict().items()
            if not name.startswith(AUDIO)  # excludes the placeholder encoder
        },
        "hyper_parameters": model,
        "datamodule_hyper_parameters": data,
        RECORD: {"version": __version__},
        CONVERTED: {"method": family.name},
    }
    write_checkpoint(content, out)
    halves = sum(tensor.dtype == torch.float16 for tensor in checkpoint.values())
    return module, _description(out, module, model, data, halves)


def _description(
    out: Path, module: RetrievalModule, model: dict[str, Any], data: dict[str, Any], halves: int
) -> list[str]:
    """Return lines about a conversion: the options that differ from the defaults, and how to test it."""
    name = type(module).__name__
    count = sum(parameter.numel() for key, parameter in module.named_parameters() if not key.startswith(AUDIO))
    lines = [f"Wrote {out}: {name}, {count / 1e6:.2f} M parameters"]
    defaults = vars(type(module.options)())
    unusual = {f"{name.lower()}.{key}": value for key, value in vars(module.options).items() if value != defaults[key]}
    for title, settings in {"Options": unusual, "Data": data}.items():
        listed = ", ".join(f"{key}: {value}" for key, value in sorted(settings.items()) if key != "_class_path")
        lines += [f"{title}: {listed}"] if listed else []
    if halves:
        lines.append(f"{halves} float16 tensors are now float32, in which the method is evaluated.")
    if "audio_encoder" in model:
        audio = model["audio_encoder"]["class_path"]
        weights = f"{audio} loads its own weights when the method is tested."
        try:
            getattr(encoders, audio).required_files(**model["audio_encoder"]["init_args"])
        except UserError as error:
            weights = f"The test needs its weights too. {error}"
        if audio == "TinyWhisperEncoder":
            weights = "No released audio encoder has its feature width, so a random TinyWhisperEncoder is used."
        lines.append(f"The checkpoint does not contain an audio encoder. {weights}")
    if model.get("protocol") == "as-released":
        lines.append(
            'Its results are marked "leaks ground truth", because the released evaluation leaks it. For a protocol\n'
            "without leakage, add --model.init_args.protocol=query."
        )
    if isinstance(module, UCoFiA):
        lines.append(
            "Published results normalize scores with all training queries: for them, add\n"
            "--config recipes/variants/ucofia-released-eval.yaml."
        )
    return [*lines, f"Test it with: tvr test --ckpt_path {out}"]
