"""X-CLIP's checkpoints (xuguohai/X-CLIP, modules/modeling_xclip.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, check_sizes, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, temporal_encoder
from tvr_lightning.methods.xclip import XCLIP

NAMES = NameMap(
    (
        ("global_mat_weight", "head.global_matrix"),
        ("local_mat_weight", "head.local_matrix"),
        ("word_logit_weight", "head.video_word.weight"),
        ("frame_logit_weight", "head.sentence_frame.weight"),
        # The longer names first: a name is replaced by the first beginning that fits.
        ("word_mat_weight2", "head.words_after_frames.weight"),
        ("word_mat_weight", "head.words_of_frame.weight"),
        ("frame_mat_weight2", "head.frames_after_words.weight"),
        ("frame_mat_weight", "head.frames_of_word.weight"),
    )
)


def import_xclip(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> XCLIP:
    """Build X-CLIP from an authors' checkpoint; its sizes come from the tensors' shapes.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for; `word_mat_weight` is (W, W).
        frames: frames F that the method is for; `frame_mat_weight` is (F, F).

    Raises:
        AuthorsCheckpointError: another method's checkpoint, unexpected or missing names, or words and frames that its
            matrices are not for.
    """
    check_family("xclip", checkpoint, source)
    fitting = {name: len(checkpoint[name]) for name in ("word_mat_weight", "frame_mat_weight") if name in checkpoint}
    found = (fitting.get("word_mat_weight", words), fitting.get("frame_mat_weight", frames))
    check_sizes(found, (words, frames), source)
    encoder = clip_encoder(checkpoint, source)
    header, layers, names = temporal_encoder(checkpoint)
    check_positions(encoder, source, words, frames, frames if header == "seqTransf" else 0)
    module = XCLIP(
        encoder, words=words, frames=frames, similarity_header=header or "meanP", temporal_layers=layers or None
    )
    return load(module, checkpoint, names | NAMES, source)
