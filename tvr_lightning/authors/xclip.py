"""X-CLIP's checkpoints (xuguohai/X-CLIP, modules/modeling_xclip.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, check_sizes, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, temporal_encoder
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.methods.xclip import XCLIP, XCLIPOptions

NAMES = NameMap(
    (
        ("global_mat_weight", "head.global_matrix"),
        ("local_mat_weight", "head.local_matrix"),
        ("word_logit_weight", "head.video_word.weight"),
        ("frame_logit_weight", "head.sentence_frame.weight"),
        # Longer names come first, because the first matching prefix is replaced.
        ("word_mat_weight2", "head.frame_word.words_after_frames.weight"),
        ("word_mat_weight", "head.frame_word.words.weight"),
        ("frame_mat_weight2", "head.frame_word.frames_after_words.weight"),
        ("frame_mat_weight", "head.frame_word.frames.weight"),
    )
)


def import_xclip(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> XCLIP:
    """Build X-CLIP from an authors' checkpoint; the shapes of the tensors determine its sizes.

    Args:
        checkpoint: Tensors by the authors' names.
        source: Name of the file, for errors.
        words: Text positions W of the method; `word_mat_weight` is (W, W).
        frames: Number of frames F of the method; `frame_mat_weight` is (F, F).

    Raises:
        UserError: The method, names, words or frames do not match the checkpoint.
    """
    check_family("xclip", checkpoint, source)
    fitting = {name: len(checkpoint[name]) for name in ("word_mat_weight", "frame_mat_weight") if name in checkpoint}
    found = (fitting.get("word_mat_weight", words), fitting.get("frame_mat_weight", frames))
    check_sizes(found, (words, frames), source)
    encoder = clip_encoder(checkpoint, source)
    header, names = temporal_encoder(checkpoint)
    check_positions(encoder, source, words, frames, frames if isinstance(header, SeqTransf) else 0)
    module = XCLIP(encoder, words=words, frames=frames, xclip=XCLIPOptions(similarity_header=header))
    return load(module, checkpoint, names | NAMES, source)
