"""Inputs of the authors' cases: tokens and pixels through the checkpoint's CLIP, or embeddings as they are."""

import torch
from torch import nn

from tvr_lightning.authors.names import load
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures


def encode_case(case, encoder):
    """Encode the token IDs (N, W) and normalized pixels (M, F, 3, S, S) of a case."""
    text = encoder.encode_tokens(case.inputs["input_ids"], case.inputs["text_mask"].bool())
    return text, encoder.encode_pixels(case.inputs["video"], case.inputs["video_mask"].bool())


def first_pairs(text, video):
    """Return the first B = min(N, M) texts and videos as matching pairs, those of the cases' training losses."""
    count = min(len(text), len(video))
    return PairedFeatures(text[:count], video[:count], torch.arange(count), torch.arange(count))


def embedded(case):
    """Return `text_embedding` (N, D) and `frame_embeddings` (M, F, D) of a case as features."""
    sentence, frames = case.inputs["text_embedding"], case.inputs["frame_embeddings"]
    mask = case.inputs.get("video_mask", torch.ones(frames.shape[:2])).bool()
    words = torch.ones(len(sentence), 1, dtype=torch.bool)
    return TextFeatures(sentence, sentence.unsqueeze(1), words), VideoFeatures(frames, mask)


def load_head(head, case, names):
    """Give a head the case's checkpoint, apart from CLIP's tensors, and return it."""
    own = {name: tensor for name, tensor in case.checkpoint.items() if not name.startswith("clip.")}
    load(nn.ModuleDict({"head": head}), own, names, str(case.path))
    return head


def case_scale(case):
    """Return exp(logit_scale) of a case's checkpoint, scalar."""
    return case.checkpoint["clip.logit_scale"].reshape(()).exp()
