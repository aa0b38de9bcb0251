"""UCoFiA's checkpoints (Ziyang412/UCoFiA, train/modules) and parity cases of its training and evaluation codes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.patch_selector import PatchSelection, PatchSelector, Predictor, indicators
from tvr_lightning.layers.sinkhorn import LogSumExp, sinkhorn_log_weights
from tvr_lightning.methods.ucofia import UCoFiA, UCoFiAHead, UCoFiAOptions
from tvr_lightning.parity.case import ParityCase, ParityError
from tvr_lightning.parity.encoder import CLIP_NAMES, clip_encoder, count_blocks
from tvr_lightning.training.losses import info_nce

PREDICTOR = "visual_token_selector.score_predictor."
HEAD_NAMES = (
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
)
# Created by the released code and never used.
UNUSED = ("word_logit_weight", "frame_mat_weight", "word_mat_weight_for_pixel")
NAMES = NameMap(
    (
        *CLIP_NAMES,
        *HEAD_NAMES,
        ("transformerClip.resblocks.", "temporal.resblocks."),
        ("frame_position_embeddings.", "temporal.frame_position_embeddings."),
    ),
    unused=UNUSED,
)
ALIGNMENTS = ("video_sentence", "sentence_frame", "word_patch")


def _sizes(checkpoint: Mapping[str, Tensor], source: str) -> tuple[int, int, int]:
    """Words W, frames F and patches per frame, CLS included, that the matrices are for."""
    missing = [n for n in ("word_mat_weight", "frame_logit_weight", "pixel_mat_weight") if n not in checkpoint]
    if missing:
        raise ParityError(f"{source}: missing {', '.join(missing)}, whose rows are UCoFiA's words, frames and patches")
    words, frames, pixels = (
        len(checkpoint[name]) for name in ("word_mat_weight", "frame_logit_weight", "pixel_mat_weight")
    )
    if pixels % frames or pixels < 2 * frames:
        raise ParityError(f"{source}: pixel_mat_weight has {pixels} rows, no multiple of its {frames} frames")
    return words, frames, pixels // frames


def _predictor(checkpoint: Mapping[str, Tensor]) -> Predictor:
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
        ParityError: another method's checkpoint, unexpected or missing names, or words and frames that its matrices are
            not for.
    """
    check_family("ucofia", checkpoint, source)
    *found, patches = _sizes(checkpoint, source)
    if found != [words, frames]:
        raise ParityError(
            f"{source}: its matrices are for {found[0]} words and {found[1]} frames, not for {words} words and "
            f"{frames} frames; give --words {found[0]} --frames {found[1]}"
        )
    encoder = clip_encoder(checkpoint, source)
    if max(words, frames) > encoder.context_length:
        raise ParityError(
            f"{source}: {words} words and {frames} frames do not fit its {encoder.context_length} text positions"
        )
    selection = PatchSelection(kept=patches - 1, predictor=_predictor(checkpoint))
    options = UCoFiAOptions(
        temporal_layers=count_blocks(checkpoint, "transformerClip.resblocks."),
        patch_selection=selection,
        patch_matrix="local_mat_weight1" in checkpoint,
    )
    module = UCoFiA(encoder, words=words, frames=frames, ucofia=options)
    module.load_state_dict(rename(checkpoint, NAMES, module.state_dict(), source))
    return module.eval()


class _Parts(nn.Module):
    """Head and selector without encoder: what a case from embeddings holds."""

    def __init__(self, checkpoint: Mapping[str, Tensor], source: str, selection: PatchSelection, trains: bool):
        super().__init__()
        words, frames, _ = _sizes(checkpoint, source)
        dimension = len(checkpoint["global_mat_weight"])
        options = UCoFiAOptions(patch_selection=selection, patch_matrix=trains)
        self.head = UCoFiAHead(dimension, words, frames, options)
        self.selector = PatchSelector(dimension, selection)
        unused = (*UNUSED, "clip.") if trains else (*UNUSED, "clip.", "local_mat_weight1")
        self.load_state_dict(rename(checkpoint, NameMap(HEAD_NAMES, unused), self.state_dict(), source))


def compute_ucofia(case: ParityCase) -> dict[str, Tensor]:
    """Compute selected patches, scores with their released scale, loss, and Sinkhorn-normalised scores of a case.

    Scores are (N, M), the selected patches of all frames in a row (M, F P', D).
    """
    given, checkpoint = case.config, case.checkpoint
    trains = str(given.get("variant", "train")) == "train"
    selection = PatchSelection(
        kept=int(given.get("topk", 3)),
        samples=int(given.get("selector_samples", 500)),
        sigma=float(given.get("selector_sigma", 0.05)),
        predictor=_predictor(checkpoint),
    )
    parts = _Parts(checkpoint, str(case.path), selection, trains).eval()
    tokens = case.input("tokens")
    noise = case.input("selector_noise(video*frame,sample,patch)").unflatten(0, tokens.shape[:2])
    cls, patches = tokens[:, :, 0], tokens[:, :, 1:]
    patch_score = parts.selector.scores(cls, patches)
    found = {
        "patch_score(video*frame,patch)": patch_score.flatten(0, 1),
        "selected_patch_index(video*frame,k)": indicators(patch_score, selection.kept).argmax(-1).flatten(0, 1),
    }
    scale = checkpoint["clip.logit_scale"].exp().reshape(())
    words = case.input("words")
    text = TextFeatures(case.input("sentence"), words, torch.ones(words.shape[:2], dtype=torch.bool))
    for name, drawn in (("noise_free", None), ("noise", noise)):
        selected = parts.selector(cls, patches, drawn)
        video = VideoFeatures(
            case.input("temporal_frames"),
            case.input("video_mask").bool(),
            patches=selected,
            clip_frames=case.input("frame_embeddings"),
        )
        scores = parts.head(text, video, scale)
        found[f"selected_tokens.{name}"] = selected.flatten(1, 2)
        found[f"similarity.{name}"] = scale * scores.similarity
        for part, score in scores.parts.items():
            found[f"score.{part}.{name}"] = score if part == "word_patch" else scale * score
    count = min(found["similarity.noise_free"].shape)
    found["loss.noise_free"] = info_nce(found["similarity.noise_free"][:count, :count])
    if "queue_score.word_patch" in case.inputs:
        found |= _sinkhorn_normalised(case, found)
    return found


def _sinkhorn_normalised(case: ParityCase, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The released evaluation: a bias for every test item from each score's training queries, then the mean."""
    biases, corrected = {}, []
    for part in ALIGNMENTS:
        queue = case.input(f"queue_score.{part}")
        _, biases[f"bias.{part}"] = sinkhorn_log_weights(*_log_sums(queue), iterations=4)
        corrected.append(found[f"score.{part}.noise_free"] + biases[f"bias.{part}"])
    plain = torch.stack([found[f"score.{part}.noise_free"] for part in ALIGNMENTS]).mean(0)
    return biases | {
        "similarity_sk_normalised": torch.stack(corrected).mean(0),
        "similarity_unnormalised": plain,
    }


def _log_sums(scores: Tensor) -> tuple[LogSumExp, LogSumExp]:
    def rows(weights: Tensor | None) -> Tensor:
        return (scores if weights is None else scores + weights).logsumexp(1)

    def columns(weights: Tensor | None) -> Tensor:
        return (scores if weights is None else scores + weights.unsqueeze(1)).logsumexp(0)

    return rows, columns
