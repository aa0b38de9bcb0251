"""TC-MGC in other sizes and keep rates, against a plain restatement that scores pair by pair."""

import math

import pytest
import torch
from parity.case import load_case
from parity.check import check_case

POOL = "conditional_transformer.pool_frames"


def normed(x, state, name):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * state[f"{POOL}.{name}.weight"] + state[f"{POOL}.{name}.bias"]


def conditioned(query, frames, state):
    """z of one text vector (D,) and the frames of one video (F, D)."""
    query, context = normed(query, state, "layer_norm1"), normed(frames, state, "layer_norm1")
    attended = (context @ query / math.sqrt(len(query))).softmax(0) @ context
    hidden = normed(attended, state, "layer_norm2")
    branch = state[f"{POOL}.linear_proj.weight"] @ hidden + state[f"{POOL}.linear_proj.bias"]
    return normed(hidden + branch, state, "layer_norm3")


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def interactive(x, matrix, temperature):
    return (x * (temperature * ((temperature * x).softmax(0) @ matrix)).softmax(0)).sum()


def pair_scores(sentence, words, coarse, fine, state, kept, temperature):
    """The four scores of one pair from unit vectors: s (D,), words (W, D), z^c (D,), z^f (W, D)."""

    def ordered(x):
        return torch.tensor(sorted(x.tolist(), reverse=True), dtype=x.dtype)

    def isa(x, name):
        return interactive(x, state[name], temperature)

    video_sentence = sentence @ state["global_mat_weight"] @ coarse
    video_word = isa(ordered(words @ coarse)[:kept], "attentive_word_logit_weight")
    similar = ordered(fine @ sentence)
    fused = (similar[kept:].softmax(0) * similar[kept:]).sum().reshape(1)
    sentence_frame = isa(torch.cat([similar[:kept], fused]), "concat_frame_word_logit_weight")
    matrix = words @ state["local_mat_weight"] @ fine.T
    columns = torch.stack([ordered(column)[:kept] for column in matrix.T], dim=1)  # (k, frame slots)
    small = torch.stack([ordered(row)[:kept] for row in columns])  # (k words, k frame slots)
    per_frame = torch.stack([isa(column, "attentive_word_mat_weight") for column in small.T])
    per_word = torch.stack([isa(row, "attentive_frame_word_mat_weight") for row in small])
    both = isa(per_frame, "attentive_frame_word_mat_weight2") + isa(per_word, "attentive_word_mat_weight2")
    return torch.stack([video_sentence, video_word, sentence_frame, both / 2])


def restated(tensors, words, kept, temperature, weight, seed):
    """A TC-MGC case on the features of a CLIP4Clip case."""
    generator = torch.Generator().manual_seed(seed)
    dimension = tensors["feature.sentence"].shape[1]

    def near_identity(size):
        return torch.eye(size) + 0.1 * torch.randn(size, size, generator=generator)

    own = {
        "global_mat_weight": near_identity(dimension),
        "local_mat_weight": near_identity(dimension),
        "logit_weight": near_identity(4),
        "concat_frame_word_logit_weight": near_identity(kept + 1),
        f"{POOL}.linear_proj.weight": 0.2 * torch.randn(dimension, dimension, generator=generator),
        f"{POOL}.linear_proj.bias": 0.2 * torch.randn(dimension, generator=generator),
    }
    for name in ("word_logit_weight", "word_mat_weight", "word_mat_weight2"):
        own[f"attentive_{name}"] = near_identity(kept)
    for name in ("frame_word_mat_weight", "frame_word_mat_weight2"):
        own[f"attentive_{name}"] = near_identity(kept)
    for n in (1, 2, 3):
        own[f"{POOL}.layer_norm{n}.weight"] = 1 + 0.2 * torch.randn(dimension, generator=generator)
        own[f"{POOL}.layer_norm{n}.bias"] = 0.2 * torch.randn(dimension, generator=generator)
    state = {name: tensor.double() for name, tensor in own.items()}
    sentence, tokens = tensors["feature.sentence"].double(), tensors["feature.words"].double()
    frames = tensors["feature.temporal_frames"].double()
    coarse = torch.stack([torch.stack([conditioned(s, clip, state) for clip in frames]) for s in sentence])
    fine = torch.stack(
        [torch.stack([torch.stack([conditioned(w, clip, state) for clip in frames]) for w in row]) for row in tokens]
    )
    scale = tensors["checkpoint.clip.logit_scale"].double().exp()
    logits = scale * torch.stack(
        [
            torch.stack(
                [
                    pair_scores(
                        unit(sentence[i]),
                        unit(tokens[i]),
                        unit(coarse[i, j]),
                        unit(fine[i, :, j]),
                        state,
                        kept,
                        temperature,
                    )
                    for j in range(len(frames))
                ]
            )
            for i in range(len(sentence))
        ]
    )
    similarity = (logits * (logits @ state["logit_weight"]).softmax(-1)).sum(-1)
    count = min(similarity.shape)
    square = similarity[:count, :count]
    info_nce = -(square.log_softmax(1).diagonal() + square.log_softmax(0).diagonal()).mean() / 2
    own_logits = torch.stack([logits[i, i] for i in range(count)])
    variance = (own_logits - own_logits.mean(1, keepdim=True)).square().sum(1) / 3
    names = ("video_sentence", "video_word", "sentence_frame", "frame_word")
    expected = {
        "similarity": similarity,
        "sentence_conditioned_video": coarse,
        "word_conditioned_frames": fine,
        "loss.info_nce": info_nce.reshape(1),
        "loss.sdr": variance.mean().reshape(1),
        "loss.total": (info_nce + weight * variance.mean()).reshape(1),
        **{f"score.{name}": logits[..., n].contiguous() for n, name in enumerate(names)},
    }
    kept_tensors = {name: t for name, t in tensors.items() if not name.startswith("expected.")}
    return (
        kept_tensors
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
def test_further_cases_hold(restate, write_case, sizes, keep_rate, temperature, weight):
    words = sizes["words"]
    tensors = restated(restate("seqTransf", **sizes), words, int(words * keep_rate), temperature, weight, seed=5)
    path = write_case(tensors, method="tcmgc", keep_rate=keep_rate, softmax_lambda=temperature, sdr_weight=weight)
    comparisons = check_case(load_case(path))
    assert sum(c.name.startswith("expected.") for c in comparisons) == 10
    assert comparisons[0].relative < 2e-5, comparisons[0]
