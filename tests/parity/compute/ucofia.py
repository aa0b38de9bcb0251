"""Cases of UCoFiA's training and evaluation codes: patches, scores with their released scale, loss, Sinkhorn biases."""

import torch
from torch import nn

from tvr_lightning.authors.convert import fixed_sizes
from tvr_lightning.authors.names import PREDICTOR, UCOFIA, load
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import ISA
from tvr_lightning.layers.patch_selector import PatchSelection, PatchSelector, indicators
from tvr_lightning.layers.sinkhorn import sinkhorn_biases
from tvr_lightning.methods.ucofia import UCoFiAHead, UCoFiAOptions
from tvr_lightning.training.losses import info_nce


def parts_of(case):
    """Return head and selector with the case's checkpoint; CLIP's and the temporal encoder's features are inputs."""
    given, checkpoint = case.config, case.checkpoint
    normed, dimension = len(checkpoint[f"{PREDICTOR}in_conv.0.weight"]), len(checkpoint["global_mat_weight"])
    selection = PatchSelection(
        kept=int(given.get("topk", 3)),
        samples=int(given.get("selector_samples", 500)),
        sigma=float(given.get("selector_sigma", 0.05)),
        predictor="train" if normed == dimension else "eval-t2v",
    )
    trains = given.get("variant", "train") == "train"
    isa = ISA(1 / float(given.get("softmax_temperature", 0.01)))
    options = UCoFiAOptions(patch_selection=selection, similarity_aggregation=isa, patch_matrix=trains)
    sizes = fixed_sizes(checkpoint)
    head = UCoFiAHead(dimension, sizes["words"], sizes["frames"], options)
    parts = nn.ModuleDict({"head": head, "selector": PatchSelector(dimension, selection)})
    # The evaluation codes do not read L1.
    unused = ["clip.", "transformerClip.", "frame_position_embeddings."] + ["local_mat_weight1"] * (not trains)
    return load(parts, checkpoint, {**UCOFIA, **dict.fromkeys(unused)}, str(case.path)), selection.kept


def compute_ucofia(case):
    """Scores are (N, M), the selected patches of all frames in a row (M, F P', D)."""
    parts, kept = parts_of(case)
    tokens, words, frames = case.inputs["tokens"], case.inputs["words"], case.inputs["frame_embeddings"]
    noise = case.inputs["selector_noise(video*frame,sample,patch)"].unflatten(0, tokens.shape[:2])
    cls, patches = tokens[:, :, 0], tokens[:, :, 1:]
    patch_score = parts["selector"].scores(cls, patches)
    found = {
        "patch_score(video*frame,patch)": patch_score.flatten(0, 1),
        "selected_patch_index(video*frame,k)": indicators(patch_score, kept).argmax(-1).flatten(0, 1),
    }
    scale = case.checkpoint["clip.logit_scale"].exp().reshape(())
    text = TextFeatures(case.inputs["sentence"], words, torch.ones(words.shape[:2], dtype=torch.bool))
    temporal = frames if case.config.get("sim_header") == "meanP" else case.inputs["temporal_frames"]
    for name, drawn in (("noise_free", None), ("noise", noise)):
        selected = parts["selector"](cls, patches, drawn)
        video = VideoFeatures(temporal, case.inputs["video_mask"].bool(), patches=selected, clip_frames=frames)
        scores = parts["head"](text, video, scale)
        found |= {f"selected_tokens.{name}": selected.flatten(1, 2), f"similarity.{name}": scale * scores.similarity}
        found |= {f"score.{part}.{name}": scale * score for part, score in scores.parts.items()}
    count = min(len(text), len(video))
    found["loss.noise_free"] = info_nce(found["similarity.noise_free"][:count, :count])
    if "queue_score.word_patch" not in case.inputs:
        return found
    # The released evaluation adds a bias of every test item, from each score's training queries, the rows of its queue.
    corrected, plain = [], [found[f"score.{part}.noise_free"] for part in scores.parts]
    for part, score in zip(scores.parts, plain, strict=True):
        _, bias = sinkhorn_biases(case.inputs[f"queue_score.{part}"], 1.0, iterations=4)
        found[f"bias.{part}"] = bias
        corrected.append(score + (bias.unsqueeze(1) if case.config.get("variant") == "eval_v2t" else bias))
    means = {"similarity_sk_normalised": corrected, "similarity_unnormalised": plain}
    return found | {name: torch.stack(of).mean(0) for name, of in means.items()}
