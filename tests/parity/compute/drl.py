"""Cases of DRL: every interaction and all decorrelation losses, from tokens of B pairs."""

import torch
from parity.compute.features import case_scale, load_head

from tvr_lightning.authors import names
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.drl import (
    DotProduct,
    DRLHead,
    TokenWise,
    WeightedTokenWise,
    decorrelation_sums,
    token_correlation,
)
from tvr_lightning.training.losses import info_nce


def compute_drl(case):
    words, frames = case.inputs["words"], case.inputs["frames"]
    text = TextFeatures(words[:, 0], words, case.inputs["text_mask"].bool())
    video = VideoFeatures(frames, case.inputs["video_mask"].bool())
    layers = sum(name.startswith("text_weight_fc.") and name.endswith("weight") for name in case.checkpoint)
    interactions = {"ti": TokenWise(), "dp": DotProduct()}
    heads = {name: DRLHead(words.shape[-1], interaction) for name, interaction in interactions.items()}
    if layers:
        heads["wti"] = load_head(DRLHead(words.shape[-1], WeightedTokenWise(weight_layers=layers)), case, names.DRL)
    found = {f"similarity.{name}": head(text, video).similarity for name, head in heads.items()}
    head = heads["wti" if layers else "ti"]
    own_words, own_frames = head.prepare(text, video)
    scaled = case_scale(case) * found[f"similarity.{case.config.get('interaction', 'wti')}"]
    found |= {
        "text_weight": own_words.weights,
        "video_weight": own_frames.weights,
        "train.scaled_similarity": scaled,
        "loss.similarity": info_nce(scaled),
    }
    correlations = {2: head.correlations(text, video, "matched")}  # (D, D) by the released number
    if layers:
        correlations[3] = head.correlations(text, video, "weighted")
    if "cdcr1_text_index" in case.inputs:  # the tokens that were drawn
        word = torch.remainder(case.inputs["cdcr1_text_index"], own_words.mask.sum(1))
        frame = torch.remainder(case.inputs["cdcr1_video_index"], own_frames.mask.sum(1))
        correlations[1] = token_correlation(own_words, own_frames, word, frame)
    first, second = (float(case.config.get(f"cdcr_alpha{i}", default)) for i, default in ((1, 1.0), (2, 0.06)))
    weight = float(case.config.get("cdcr_lambda", 0.001))
    for number, correlation in correlations.items():
        on_diagonal, off_diagonal = decorrelation_sums(correlation)
        total = first * on_diagonal + second * off_diagonal
        found |= {
            f"loss.cdcr{number}.on_diagonal": on_diagonal,
            f"loss.cdcr{number}.off_diagonal": off_diagonal,
            f"loss.cdcr{number}.alpha_{first:g}_{second:g}": total,
            f"loss.total_cdcr{number}_lambda_{weight:g}": found["loss.similarity"] + weight * total,
        }
    return found
