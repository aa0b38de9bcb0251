"""X-Pool's checkpoints (layer6ai-labs/xpool, model/clip_transformer.py) and parity cases."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.authors.huggingface import with_openai_names
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.xpool import XPool, XPoolHead, XPoolOptions
from tvr_lightning.parity.case import ParityCase, ParityError
from tvr_lightning.parity.encoder import CLIP_NAMES, clip_encoder

NAMES = NameMap((*CLIP_NAMES, ("pool_frames.", "head.attention.")))


def import_xpool(
    checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12, heads: int = 1
) -> XPool:
    """Build X-Pool from an authors' checkpoint; every size comes from the tensors' shapes.

    Args:
        checkpoint: tensors by the authors' names, CLIP's by OpenAI's or transformers' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for.
        heads: attention heads, which no shape tells (released: 1).

    Raises:
        ParityError: another method's checkpoint, unexpected or missing names, or too many words.
    """
    check_family("xpool", checkpoint, source)
    checkpoint = with_openai_names(checkpoint, source)
    encoder = clip_encoder(checkpoint, source)
    check_words(words, encoder.context_length, source)
    module = XPool(encoder, words=words, frames=frames, xpool=XPoolOptions(heads))
    module.load_state_dict(rename(checkpoint, NAMES, module.state_dict(), source))
    return module.eval()


def check_words(words: int, context_length: int, source: str) -> None:
    """Refuse more words than a checkpoint has positions for.

    Raises:
        ParityError: says how many it has.
    """
    if words > context_length:
        raise ParityError(
            f"{source}: {words} words do not fit; the checkpoint has positions for {context_length} words"
        )


def compute_xpool(case: ParityCase) -> dict[str, Tensor]:
    """Compute cosines (N, M) and the pooled video (M, N, D) of every pair of an X-Pool case."""
    text, video = embedded(case)
    head = XPoolHead(text.sentence.shape[1], video.frames.shape[1], case_attention(case))
    load(head, case, NameMap((("pool_frames.", "attention."),)))
    pooled = head.pooled(*head.prepare(text, video)).materialize()
    return {
        "pooled_video(video,text)": pooled[:, :, 0].transpose(0, 1),
        "similarity": head(text, video).similarity,
    }


def case_attention(case: ParityCase) -> XPoolOptions:
    """Return the attention that a case's metadata describe, without dropout as in evaluation."""
    return XPoolOptions(heads=int(case.config.get("num_mha_heads", 1)), dropout=0.0)


def embedded(case: ParityCase) -> tuple[TextFeatures, VideoFeatures]:
    """Return the embeddings of a case as features: `text_embedding` (N, D) and `frame_embeddings` (M, F, D)."""
    sentence, frames = case.input("text_embedding"), case.input("frame_embeddings")
    mask = case.inputs.get("video_mask", torch.ones(frames.shape[:2])).bool()
    words = torch.ones(len(sentence), 1, dtype=torch.bool)
    return TextFeatures(sentence, sentence.unsqueeze(1), words), VideoFeatures(frames, mask)


def load(head: nn.Module, case: ParityCase, names: NameMap) -> None:
    """Load a head with a case's checkpoint and put it into evaluation mode; the case has no encoder.

    Raises:
        ParityError: tensors that the head does not have, or not all that it needs.
    """
    own = {name: tensor for name, tensor in case.checkpoint.items() if not name.startswith("clip.")}
    head.load_state_dict(rename(own, names, head.state_dict(), str(case.path)))
    head.eval()


def case_scale(case: ParityCase) -> Tensor:
    """Return exp(logit_scale) of a case's checkpoint, scalar.

    Raises:
        ParityError: it has none.
    """
    if "clip.logit_scale" not in case.checkpoint:
        raise ParityError(f"{case.path}: no tensor checkpoint.clip.logit_scale; a {case.method} case needs it")
    return case.checkpoint["clip.logit_scale"].reshape(()).exp()
