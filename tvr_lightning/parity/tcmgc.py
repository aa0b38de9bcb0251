"""TC-MGC's checkpoints (JingXiaolun/TC-MGC, modeling_tcmgc.py) and parity cases."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import ISA
from tvr_lightning.methods.tcmgc import TCMGC, Decorrelation, LanguageVideoAttention, TCMGCOptions
from tvr_lightning.pairwise import DensePairVectors
from tvr_lightning.parity.case import ParityCase, ParityError
from tvr_lightning.parity.encoder import CLIP_NAMES, clip_encoder, count_blocks, encode_case, first_pairs

NAMES = NameMap(
    (
        *CLIP_NAMES,
        ("transformerClip.resblocks.", "temporal.resblocks."),
        ("frame_position_", "temporal.frame_position_"),
        ("conditional_transformer.pool_frames.", "head.attention."),
        ("global_mat_weight", "head.global_matrix"),
        ("local_mat_weight", "head.local_matrix"),
        ("logit_weight", "head.lsa.weight"),
        ("attentive_word_logit_weight", "head.video_word_aggregation.weight"),
        ("concat_frame_word_logit_weight", "head.sentence_frame_aggregation.weight"),
        ("attentive_word_mat_weight2", "head.frame_word_aggregation.words_after_frames.weight"),
        ("attentive_word_mat_weight", "head.frame_word_aggregation.words.weight"),
        ("attentive_frame_word_mat_weight2", "head.frame_word_aggregation.frames_after_words.weight"),
        ("attentive_frame_word_mat_weight", "head.frame_word_aggregation.frames.weight"),
    ),
    # The released forward pass has the lines of W_Q, W_K, W_V and W_O commented out.
    unused=("conditional_transformer.pool_frames.cross_attn.",),
)


def fitting_keep_rate(kept: int, words: int) -> float:
    """Return a keep rate r with int(words r) = kept: the released 0.1 where it fits, else the roundest one.

    Raises:
        ValueError: more is kept than there are words.
    """
    if not 1 <= kept <= words:
        raise ValueError(f"no keep rate keeps {kept} of {words} words")
    candidates = [0.1, *(step / 10 for step in range(1, 11)), *(step / 100 for step in range(1, 101))]
    fitting = (rate for rate in candidates if int(words * rate) == kept)
    return next(fitting, (kept + 0.5) / words)


def _keep_rate(checkpoint: Mapping[str, Tensor], source: str, words: int, keep_rate: float | None) -> float:
    matrix = checkpoint.get("attentive_word_logit_weight")
    if matrix is None:
        raise ParityError(f"{source}: missing attentive_word_logit_weight, whose rows say how many words are kept")
    kept = len(matrix)
    if kept > words:
        raise ParityError(
            f"{source}: its matrices keep {kept} words, so they do not fit {words} words; {kept} or more words fit"
        )
    if keep_rate is not None and int(words * keep_rate) != kept:
        raise ParityError(
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
    """Build TC-MGC from an authors' checkpoint; what shapes do not tell comes as arguments.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for.
        keep_rate: r; None chooses one that the matrices' k = int(W r) fits; `attentive_word_logit_weight` is (k, k).
        softmax_lambda: factor inside the softmaxes over slots.
        decorrelation_weight: alpha of SDR.
        heads: attention heads.

    Raises:
        ParityError: another method's checkpoint, unexpected or missing names, or words, frames and keep rate that its
            matrices do not fit.
    """
    check_family("tcmgc", checkpoint, source)
    keep_rate = _keep_rate(checkpoint, source, words, keep_rate)
    encoder = clip_encoder(checkpoint, source)
    if max(words, frames) > encoder.context_length:
        raise ParityError(
            f"{source}: {words} words and {frames} frames do not fit; the checkpoint has positions for "
            f"{encoder.context_length} of each"
        )
    try:
        module = TCMGC(
            encoder,
            words=words,
            frames=frames,
            tcmgc=TCMGCOptions(
                temporal_layers=count_blocks(checkpoint, "transformerClip.resblocks."),
                attention=LanguageVideoAttention(heads=heads),
                keep_rate=keep_rate,
                similarity_aggregation=ISA(softmax_lambda),
                decorrelation=Decorrelation(weight=decorrelation_weight),
            ),
        )
    except ValueError as error:
        raise ParityError(f"{source}: {error}") from error
    module.load_state_dict(rename(checkpoint, NAMES, module.state_dict(), source))
    return module.eval()


def compute_tcmgc(case: ParityCase) -> dict[str, Tensor]:
    """Compute features, scores with the factor exp(logit_scale), conditioned features and losses of a TC-MGC case.

    Scores are (N, M), videos conditioned on sentences (N, M, D), frames conditioned on words (N, W, M, D).
    """
    config = case.config
    module = import_tcmgc(
        case.checkpoint,
        str(case.path),
        words=case.input("input_ids").shape[1],
        frames=case.input("video").shape[1],
        keep_rate=config.get("keep_rate"),
        softmax_lambda=float(config.get("softmax_lambda", 100.0)),
        decorrelation_weight=float(config.get("sdr_weight", 0.5)),
        heads=int(config.get("num_mha_heads", 1)),
    )
    text, video = encode_case(case, module.encoder)
    related = module.encode_video(video)
    scale = module.temperature()
    scores = module.score(text, related)
    pairs = first_pairs(text, related)
    terms = module.losses(pairs)
    conditioned = _conditioned(module, text, related)
    return {
        "feature.sentence": text.sentence,
        "feature.words": text.words,
        "feature.frames": video.frames,
        "feature.temporal_frames": related.frames,
        "similarity": scale * scores.similarity,
        **{f"score.{name}": scale * part for name, part in scores.parts.items()},
        "sentence_conditioned_video": conditioned[:, :, 0],
        "word_conditioned_frames": conditioned[:, :, 1:].transpose(1, 2),
        "loss.info_nce": terms["info_nce"],
        "loss.sdr": module.head.decorrelation(module.score(pairs.text, pairs.video), scale),
        "loss.total": sum(terms.values(), scale.new_zeros(())),
    }


def _conditioned(module: TCMGC, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Text-conditioned vectors (N, M, 1 + W, D): z of the sentence, then z of every word."""
    attention = module.head.attention
    assert attention is not None  # an imported TC-MGC conditions on the text
    queries = attention.queries(torch.cat([text.sentence.unsqueeze(1), text.words], dim=1))
    return attention(DensePairVectors.from_texts(queries, videos=len(video)), video.frames).materialize()
