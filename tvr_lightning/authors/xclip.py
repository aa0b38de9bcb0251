"""X-CLIP's checkpoints (xuguohai/X-CLIP, modules/modeling_xclip.py) and parity cases."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.authors.clip import CLIP_NAMES, clip_encoder, count_blocks, encode_case, first_pairs
from tvr_lightning.methods.xclip import XCLIP, XCLIPHeader
from tvr_lightning.parity.case import ParityCase, ParityError

NAMES = NameMap(
    (
        *CLIP_NAMES,
        ("transformerClip.resblocks.", "temporal.resblocks."),
        ("frame_position_embeddings.", "temporal.frame_position_embeddings."),
        ("lstm_visual.", "temporal.lstm_visual."),
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


def _header(checkpoint: Mapping[str, Tensor]) -> tuple[XCLIPHeader, int | None]:
    """Header and temporal layers that a checkpoint was trained with, by its names."""
    blocks = count_blocks(checkpoint, "transformerClip.resblocks.")
    if blocks:
        return "seqTransf", blocks
    layers = sum(name.startswith("lstm_visual.weight_ih_l") for name in checkpoint)
    return ("seqLSTM", layers) if layers else ("meanP", None)


def import_xclip(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> XCLIP:
    """Build X-CLIP from an authors' checkpoint; its sizes come from the tensors' shapes.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for; `word_mat_weight` is (W, W).
        frames: frames F that the method is for; `frame_mat_weight` is (F, F).

    Raises:
        ParityError: another method's checkpoint, unexpected or missing names, or words and frames that its matrices are
            not for.
    """
    check_family("xclip", checkpoint, source)
    fitting = {name: len(checkpoint[name]) for name in ("word_mat_weight", "frame_mat_weight") if name in checkpoint}
    found = fitting.get("word_mat_weight", words), fitting.get("frame_mat_weight", frames)
    if found != (words, frames):
        raise ParityError(
            f"{source}: its matrices are for {found[0]} words and {found[1]} frames, not for {words} words and "
            f"{frames} frames; give --words {found[0]} --frames {found[1]}"
        )
    encoder = clip_encoder(checkpoint, source)
    header, layers = _header(checkpoint)
    if words > encoder.context_length or (header == "seqTransf" and frames > encoder.context_length):
        raise ParityError(
            f"{source}: {words} words and {frames} frames do not fit its {encoder.context_length} text positions"
        )
    names = NAMES
    if header != "seqTransf":
        # The released code creates position embeddings for every header; only seqTransf adds them.
        prefixes = tuple(pair for pair in NAMES.prefixes if pair[0] != "frame_position_embeddings.")
        names = NameMap(prefixes, unused=("frame_position_embeddings.",))
    module = XCLIP(encoder, words=words, frames=frames, similarity_header=header, temporal_layers=layers)
    module.load_state_dict(rename(checkpoint, names, module.state_dict(), source))
    return module.eval()


def compute_xclip(case: ParityCase) -> dict[str, Tensor]:
    """Compute features, similarity (N, M) with the factor exp(logit_scale), its parts, and loss of an X-CLIP case."""
    words, frames = case.input("input_ids").shape[1], case.input("video").shape[1]
    module = import_xclip(case.checkpoint, str(case.path), words, frames)
    text, video = encode_case(case, module.encoder)
    related = module.encode_video(video)
    scores, scale = module.score(text, related), module.temperature()
    return {
        "feature.sentence": text.sentence,
        "feature.words": text.words,
        "feature.frames": video.frames,
        "feature.temporal_frames": related.frames,
        "similarity": scale * scores.similarity,
        **{f"score.{name}": scale * part for name, part in scores.parts.items()},
        "loss": module.losses(first_pairs(text, related))["info_nce"],
    }
