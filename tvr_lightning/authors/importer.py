"""Build a method from an authors' checkpoint."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tvr_lightning.authors.families import FAMILIES, Family
from tvr_lightning.authors.names import SHIFTED, load, replace_prefix, with_openai_names
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.clip import SizedClipEncoder, openai_configuration
from tvr_lightning.encoders.weights import listed
from tvr_lightning.encoders.whisper import TinyWhisperEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf, SimilarityHeader
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import TightTransf
from tvr_lightning.methods.gaid.method import GAID
from tvr_lightning.methods.ucofia import UCoFiA


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
        raise UserError(f"{source}: no known method has these tensors: {listed(names)}")
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
            f"under both names: {listed(other)}"
        )
    return {name: tensor for name, tensor in checkpoint.items() if name not in twins}


def without_net(checkpoint: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return a checkpoint with CLIP's names for the attentions of UCoFiA's patch shift."""
    renamed = {str(replace_prefix(name, SHIFTED)): tensor for name, tensor in checkpoint.items()}
    if len(renamed) < len(checkpoint):
        plain = [name for name in checkpoint if name.startswith(tuple(SHIFTED.values())) and ".net." not in name]
        raise UserError(f"{source}: unexpected tensors in addition to the patch shift's attn.net.*: {listed(plain)}")
    return renamed


def with_openai_attention(
    checkpoint: Mapping[str, Tensor], openai: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Return a checkpoint of UCoFiA with OpenAI's attention in the shifted blocks, as in its released evaluation."""
    attention = [name for name in checkpoint if name.startswith(tuple(SHIFTED.values()))]
    missing = [name for name in attention if name.removeprefix("clip.") not in openai]
    if missing:
        raise UserError(f"{source}: OpenAI's CLIP has no {listed(missing)}. Name the file of OpenAI's weights.")
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
