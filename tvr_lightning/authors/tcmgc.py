"""TC-MGC's checkpoints (JingXiaolun/TC-MGC, modeling_tcmgc.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, temporal_layers
from tvr_lightning.errors import UserError
from tvr_lightning.layers.aggregation import ISA
from tvr_lightning.methods.tcmgc import TCMGC, Decorrelation, LanguageVideoAttention, TCMGCOptions

NAMES = NameMap(
    (
        ("conditional_transformer.pool_frames.", "head.attention."),
        ("global_mat_weight", "head.global_matrix"),
        ("local_mat_weight", "head.local_matrix"),
        # https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/modeling_tcmgc.py#L426
        ("logit_weight", "head.lsa.weight"),
        ("attentive_word_logit_weight", "head.video_word_aggregation.weight"),
        ("concat_frame_word_logit_weight", "head.sentence_frame_aggregation.weight"),
        ("attentive_word_mat_weight2", "head.frame_word_aggregation.words_after_frames.weight"),
        ("attentive_word_mat_weight", "head.frame_word_aggregation.words.weight"),
        ("attentive_frame_word_mat_weight2", "head.frame_word_aggregation.frames_after_words.weight"),
        ("attentive_frame_word_mat_weight", "head.frame_word_aggregation.frames.weight"),
    ),
    # The lines for W_Q, W_K, W_V and W_O are commented out in the released forward pass.
    # https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/module_xpool.py#L36-L74
    unused=("conditional_transformer.pool_frames.cross_attn.",),
)


def fitting_keep_rate(kept: int, words: int) -> float:
    """Return a keep rate r with int(words r) = kept: the released 0.1 if it fits, or else the roundest one.

    Raises:
        UserError: `kept` exceeds the number of words.
    """
    if not 1 <= kept <= words:
        raise UserError(f"there is no keep rate that keeps {kept} of {words} words")
    candidates = [0.1, *(step / 10 for step in range(1, 11)), *(step / 100 for step in range(1, 101))]
    fitting = (rate for rate in candidates if int(words * rate) == kept)
    return next(fitting, (kept + 0.5) / words)


def _keep_rate(checkpoint: Mapping[str, Tensor], source: str, words: int, keep_rate: float | None) -> float:
    matrix = checkpoint.get("attentive_word_logit_weight")
    if matrix is None:
        raise UserError(f"{source}: attentive_word_logit_weight is missing, whose rows give the number of kept words")
    kept = len(matrix)
    if kept > words:
        raise UserError(
            f"{source}: its matrices keep {kept} words, so they do not fit {words} words; {kept} or more words fit"
        )
    if keep_rate is not None and int(words * keep_rate) != kept:
        raise UserError(
            f"{source}: its matrices keep {kept} similarities; {words} words at keep rate {keep_rate} keep "
            f"{int(words * keep_rate)}. With {words} words a keep rate from {kept / words:.4g} to below "
            f"{(kept + 1) / words:.4g} fits"
        )
    return fitting_keep_rate(kept, words) if keep_rate is None else keep_rate


def import_tcmgc(
    checkpoint: Mapping[str, Tensor],
    source: str,
    words: int = 32,
    frames: int = 12,
    keep_rate: float | None = None,
    softmax_lambda: float = 100.0,
    decorrelation_weight: float = 0.5,
    heads: int = 1,
) -> TCMGC:
    """Build TC-MGC from an authors' checkpoint; arguments provide what the shapes do not determine.

    Args:
        checkpoint: Tensors by the authors' names.
        source: Name of the file, for errors.
        words: Text positions W of the method.
        frames: Number of frames F of the method.
        keep_rate: Keep rate r; None derives it from the size k = int(W r) of `attentive_word_logit_weight` (k, k).
        softmax_lambda: Factor inside the softmaxes over slots.
        decorrelation_weight: Weight alpha of SDR.
        heads: Number of attention heads.

    Raises:
        UserError: The method, names, words, frames or keep rate do not match the checkpoint.
    """
    check_family("tcmgc", checkpoint, source)
    keep_rate = _keep_rate(checkpoint, source, words, keep_rate)
    encoder = clip_encoder(checkpoint, source)
    layers, names = temporal_layers(checkpoint)
    check_positions(encoder, source, words, frames, frames)
    try:
        module = TCMGC(
            encoder,
            words=words,
            frames=frames,
            tcmgc=TCMGCOptions(
                temporal_layers=layers,
                attention=LanguageVideoAttention(heads=heads),
                keep_rate=keep_rate,
                similarity_aggregation=ISA(softmax_lambda),
                decorrelation=Decorrelation(weight=decorrelation_weight),
            ),
        )
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    return load(module, checkpoint, names | NAMES, source)
