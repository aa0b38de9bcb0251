"""TC-MGC in other sizes and keep rates, against a plain restatement that scores pair by pair."""

import math

import pytest
import torch
from parity.case import load_case
from parity.check import check_case
from parity.restated import (
    Sizes,
    affine,
    isa,
    layer_norm,
    linear,
    near_identity,
    nested,
    norm,
    restated_case,
    symmetric_loss,
    unit,
)  # fmt: skip

POOL = "conditional_transformer.pool_frames"


def conditioned(query, frames, state):
    """z of one text vector (D,) and the frames of one video (F, D)."""
    query, context = (norm(x, state, f"{POOL}.layer_norm1", 1e-5) for x in (query, frames))
    attended = (context @ query / math.sqrt(len(query))).softmax(0) @ context
    hidden = norm(attended, state, f"{POOL}.layer_norm2", 1e-5)
    return norm(hidden + affine(hidden, state, f"{POOL}.linear_proj."), state, f"{POOL}.layer_norm3", 1e-5)


def pair_scores(sentence, words, coarse, fine, state, kept, temperature):
    """The four scores of one pair from unit vectors: s (D,), words (W, D), z^c (D,), z^f (W, D)."""

    def ordered(x):
        return torch.tensor(sorted(x.tolist(), reverse=True), dtype=x.dtype)

    def aggregated(x, name):
        return isa(x, state[name], temperature)

    video_sentence = sentence @ state["global_mat_weight"] @ coarse
    video_word = aggregated(ordered(words @ coarse)[:kept], "attentive_word_logit_weight")
    similar = ordered(fine @ sentence)
    fused = (similar[kept:].softmax(0) * similar[kept:]).sum().reshape(1)
    sentence_frame = aggregated(torch.cat([similar[:kept], fused]), "concat_frame_word_logit_weight")
    matrix = words @ state["local_mat_weight"] @ fine.T
    columns = torch.stack([ordered(column)[:kept] for column in matrix.T], dim=1)  # (k, frame slots)
    small = torch.stack([ordered(row)[:kept] for row in columns])  # (k words, k frame slots)
    per_frame = torch.stack([aggregated(column, "attentive_word_mat_weight") for column in small.T])
    per_word = torch.stack([aggregated(row, "attentive_frame_word_mat_weight") for row in small])
    both = aggregated(per_frame, "attentive_frame_word_mat_weight2") + aggregated(
        per_word, "attentive_word_mat_weight2"
    )
    return torch.stack([video_sentence, video_word, sentence_frame, both / 2])


def restated(tensors, kept, temperature, weight, seed):
    """A TC-MGC case on the features of a CLIP4Clip case."""
    generator = torch.Generator().manual_seed(seed)
    dimension = tensors["feature.sentence"].shape[1]
    sizes = {"global_mat_weight": dimension, "local_mat_weight": dimension, "logit_weight": 4}
    sizes["concat_frame_word_logit_weight"] = kept + 1
    matrices = ("word_logit_weight", "word_mat_weight", "word_mat_weight2", "frame_word_mat_weight")
    sizes |= {f"attentive_{name}": kept for name in (*matrices, "frame_word_mat_weight2")}
    own = {name: near_identity(size, generator) for name, size in sizes.items()}
    shapes = linear(f"{POOL}.linear_proj.", dimension, dimension)
    for n in (1, 2, 3):
        shapes |= layer_norm(f"{POOL}.layer_norm{n}", dimension)
    for name, shape in shapes.items():
        own[name] = 0.2 * torch.randn(shape, generator=generator) + ("norm" in name and name.endswith("weight"))
    state = {name: tensor.double() for name, tensor in own.items()}
    sentence, tokens = tensors["feature.sentence"].double(), tensors["feature.words"].double()
    frames = tensors["feature.temporal_frames"].double()
    coarse = nested([conditioned(s, clip, state) for clip in frames] for s in sentence)
    fine = torch.stack([nested([conditioned(w, clip, state) for clip in frames] for w in row) for row in tokens])
    scale = tensors["checkpoint.clip.logit_scale"].double().exp()
    texts = zip(unit(sentence), unit(tokens), unit(coarse), unit(fine).transpose(1, 2), strict=True)
    logits = scale * nested(
        [pair_scores(s, w, *z, state, kept, temperature) for z in zip(*videos, strict=True)] for s, w, *videos in texts
    )
    similarity = (logits * (logits @ state["logit_weight"]).softmax(-1)).sum(-1)
    info_nce = symmetric_loss(similarity)
    own_logits = logits.diagonal().T  # (B, 4)
    variance = ((own_logits - own_logits.mean(1, keepdim=True)).square().sum(1) / 3).mean().reshape(1)
    names = ("video_sentence", "video_word", "sentence_frame", "frame_word")
    expected = {
        "similarity": similarity,
        "sentence_conditioned_video": coarse,
        "word_conditioned_frames": fine,
        "loss.info_nce": info_nce,
        "loss.sdr": variance,
        "loss.total": info_nce + weight * variance,
        **{f"score.{name}": logits[..., n].contiguous() for n, name in enumerate(names)},
    }
    return (
        {name: tensor for name, tensor in tensors.items() if not name.startswith("expected.")}
        | {f"checkpoint.{name}": tensor for name, tensor in own.items()}
        | {f"expected.{name}": tensor.float() for name, tensor in expected.items()}
    )


@pytest.mark.parametrize(
    ("sizes", "keep_rate", "temperature", "weight"),
    [
        ({"dimension": 64, "texts": 3, "videos": 4, "words": 8, "frames": 5}, 0.4, 100.0, 0.5),
        ({"dimension": 128, "texts": 4, "videos": 2, "words": 9, "temporal_layers": 1, "seed": 11}, 0.7, 10.0, 0.3),
        ({"dimension": 64, "texts": 2, "videos": 3, "words": 10, "frames": 2, "seed": 12}, 0.1, 1.0, 0.0),
    ],
)
def test_tcmgc_of_other_sizes_equals_the_restatement(write_case, sizes, keep_rate, temperature, weight):
    plain = restated_case(Sizes(**sizes), "seqTransf")
    tensors = restated(plain, int(sizes["words"] * keep_rate), temperature, weight, seed=5)
    path = write_case(tensors, method="tcmgc", keep_rate=keep_rate, softmax_lambda=temperature, sdr_weight=weight)
    comparisons = check_case(load_case(path))
    assert sum(c.name.startswith("expected.") for c in comparisons) == 10
    assert comparisons[0].relative < 2e-5, comparisons[0]
