"""UCoFiA's checkpoints (Ziyang412/UCoFiA, train/modules)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import AuthorsCheckpointError, NameMap, check_family, check_sizes, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, temporal_layers
from tvr_lightning.layers.patch_selector import PatchSelection, Predictor
from tvr_lightning.methods.ucofia import UCoFiA, UCoFiAOptions

PREDICTOR = "visual_token_selector.score_predictor."
NAMES = NameMap(
    (
        # The longer names first: a name is replaced by the first beginning that fits.
        ("global_mat_weight_1", "head.video_matrix"),
        ("global_mat_weight", "head.sentence_matrix"),
        ("local_mat_weight1", "head.patch_matrix"),
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
    # Created by the released code and never used.
    unused=("word_logit_weight", "frame_mat_weight", "word_mat_weight_for_pixel"),
)


def matrix_sizes(checkpoint: Mapping[str, Tensor], source: str) -> tuple[int, int, int]:
    """Words W, frames F and patches per frame, CLS included, that the matrices are for."""
    missing = [n for n in ("word_mat_weight", "frame_logit_weight", "pixel_mat_weight") if n not in checkpoint]
    if missing:
        raise AuthorsCheckpointError(
            f"{source}: missing {', '.join(missing)}, whose rows are UCoFiA's words, frames and patches"
        )
    words, frames, pixels = (
        len(checkpoint[name]) for name in ("word_mat_weight", "frame_logit_weight", "pixel_mat_weight")
    )
    if pixels % frames or pixels < 2 * frames:
        raise AuthorsCheckpointError(
            f"{source}: pixel_mat_weight has {pixels} rows, no multiple of its {frames} frames"
        )
    return words, frames, pixels // frames


def predictor(checkpoint: Mapping[str, Tensor]) -> Predictor:
    """The training code's predictor maps D to D/2; that of the text-to-video evaluation code 2D to D."""
    width, dimension = checkpoint[f"{PREDICTOR}in_conv.1.weight"].shape[1], len(checkpoint["global_mat_weight"])
    return "train" if width == dimension else "eval-t2v"


def import_ucofia(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> UCoFiA:
    """Build UCoFiA from an authors' checkpoint; its sizes come from the tensors' shapes.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for; `word_mat_weight` is (W, W).
        frames: frames F that the method is for; `frame_logit_weight` is (F, F).

    Raises:
        AuthorsCheckpointError: another method's checkpoint, unexpected or missing names, or words and frames that its
            matrices are not for.
    """
    check_family("ucofia", checkpoint, source)
    found_words, found_frames, patches = matrix_sizes(checkpoint, source)
    check_sizes((found_words, found_frames), (words, frames), source)
    encoder = clip_encoder(checkpoint, source)
    layers, names = temporal_layers(checkpoint)
    check_positions(encoder, source, words, frames, frames if layers else 0)
    selection = PatchSelection(kept=patches - 1, predictor=predictor(checkpoint))
    module = UCoFiA(
        encoder,
        words=words,
        frames=frames,
        ucofia=UCoFiAOptions(
            temporal_layers=layers,
            patch_selection=selection,
            patch_matrix="local_mat_weight1" in checkpoint,
        ),
    )
    return load(module, checkpoint, names | NAMES, source)
