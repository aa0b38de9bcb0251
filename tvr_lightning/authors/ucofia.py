"""UCoFiA's checkpoints (Ziyang412/UCoFiA, train/modules)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, check_sizes, listed, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, temporal_layers
from tvr_lightning.errors import UserError
from tvr_lightning.layers.patch_selector import PatchSelection, Predictor
from tvr_lightning.methods.ucofia import UCoFiA, UCoFiAOptions

# Attention of the two blocks that `make_patch_shift` wraps (modules/until_module.py): block number, rest of the name.
ATTENTION = re.compile(r"clip\.visual\.transformer\.resblocks\.(10|11)\.attn\.(net\.)?(.+)")
L1 = "local_mat_weight1"
PREDICTOR = "visual_token_selector.score_predictor."
NAMES = NameMap(
    (
        # Longer names come first, because the first matching prefix is replaced.
        ("global_mat_weight_1", "head.video_matrix"),
        ("global_mat_weight", "head.sentence_matrix"),
        (L1, "head.patch_matrix"),
        ("local_mat_weight", "head.word_matrix"),
        ("frame_logit_weight", "head.sentence_frame.weight"),
        ("pixel_mat_weight2", "head.word_patch.frames_after_words.weight"),
        ("pixel_mat_weight", "head.word_patch.frames.weight"),
        ("word_mat_weight2", "head.word_patch.words_after_frames.weight"),
        ("word_mat_weight", "head.word_patch.words.weight"),
        (f"{PREDICTOR}in_conv.0.", "selector.scores.norm."),
        (f"{PREDICTOR}in_conv.1.", "selector.scores.inner."),
        (f"{PREDICTOR}out_conv.0.", "selector.scores.joint."),
        (f"{PREDICTOR}out_conv.2.", "selector.scores.out."),
    ),
    # Created by the released code but never used.
    unused=("word_logit_weight", "frame_mat_weight", "word_mat_weight_for_pixel"),
)


def matrix_sizes(checkpoint: Mapping[str, Tensor], source: str) -> tuple[int, int, int]:
    """Return the words W, frames F and patches per frame, including CLS, of the matrices."""
    missing = [n for n in ("word_mat_weight", "frame_logit_weight", "pixel_mat_weight") if n not in checkpoint]
    if missing:
        raise UserError(
            f"{source}: missing tensors {', '.join(missing)}, whose rows are UCoFiA's words, frames, and patches"
        )
    words, frames, pixels = (
        len(checkpoint[name]) for name in ("word_mat_weight", "frame_logit_weight", "pixel_mat_weight")
    )
    if pixels % frames or pixels < 2 * frames:
        raise UserError(f"{source}: pixel_mat_weight has {pixels} rows, which is not a multiple of its {frames} frames")
    return words, frames, pixels // frames


def predictor(checkpoint: Mapping[str, Tensor]) -> Predictor:
    """Return the predictor: D to D/2 in the training code, 2D to D in the text-to-video evaluation code."""
    width, dimension = checkpoint[f"{PREDICTOR}in_conv.1.weight"].shape[1], len(checkpoint["global_mat_weight"])
    return "train" if width == dimension else "eval-t2v"


def unwrapped(checkpoint: Mapping[str, Tensor], source: str) -> tuple[dict[str, Tensor], bool]:
    """Return a checkpoint with CLIP's own names for shifted attentions, and whether it contains shifted attentions.

    Raises:
        UserError: Only some tensors of the two blocks have the names of a wrapped attention.
    """
    found = {name: match for name in checkpoint if (match := ATTENTION.fullmatch(name)) is not None}
    wrapped = [name for name, match in found.items() if match[2]]
    if wrapped and len(wrapped) < len(found):
        plain = [name for name in found if name not in wrapped]
        raise UserError(
            f"{source}: these tensors are unexpected together with the patch shift's attn.net.*: {listed(plain)}"
        )
    names = {name: name.replace(".attn.net.", ".attn.") for name in wrapped}
    return {names.get(name, name): tensor for name, tensor in checkpoint.items()}, bool(wrapped)


def import_ucofia(
    checkpoint: Mapping[str, Tensor],
    source: str,
    words: int = 32,
    frames: int = 12,
    openai: Mapping[str, Tensor] | None = None,
) -> UCoFiA:
    """Build UCoFiA from an authors' checkpoint; the shapes of the tensors determine its sizes.

    The code with the text-to-video evaluation's predictor never uses L1, so a checkpoint with that predictor is built
    without it.

    Args:
        checkpoint: Tensors by the authors' names.
        source: Name of the file, for errors.
        words: Text positions W of the method; `word_mat_weight` is (W, W).
        frames: Number of frames F of the method; `frame_logit_weight` is (F, F).
        openai: OpenAI's CLIP, to evaluate the checkpoint as in the released evaluation: with OpenAI's attention in the
            shifted vision blocks, without L1, and with noise in the patch selector.

    Raises:
        UserError: The method, names, words or frames do not match the checkpoint.
    """
    check_family("ucofia", checkpoint, source)
    checkpoint, shifted = unwrapped(checkpoint, source)
    found_words, found_frames, patches = matrix_sizes(checkpoint, source)
    check_sizes((found_words, found_frames), (words, frames), source)
    kind = predictor(checkpoint)
    if openai is not None:
        attention = {name: name.removeprefix("clip.") for name in checkpoint if ATTENTION.fullmatch(name)}
        missing = [name for name in attention.values() if name not in openai]
        if missing:
            raise UserError(
                f"These tensors of OpenAI's CLIP are missing: {listed(missing)}. Name the file of OpenAI's weights."
            )
        checkpoint |= {name: openai[theirs] for name, theirs in attention.items()}
    if openai is not None or kind == "eval-t2v":
        checkpoint.pop(L1, None)
    encoder = clip_encoder(checkpoint, source, patch_shift=shifted)
    layers, names = temporal_layers(checkpoint)
    check_positions(encoder, source, words, frames, frames if layers else 0)
    module = UCoFiA(
        encoder,
        words=words,
        frames=frames,
        ucofia=UCoFiAOptions(
            temporal_layers=layers,
            patch_selection=PatchSelection(kept=patches - 1, predictor=kind, noise_eval=openai is not None),
            patch_matrix=L1 in checkpoint,
        ),
    )
    return load(module, checkpoint, names | NAMES, source)
