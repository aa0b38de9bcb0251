"""UCoFiA in other shapes than the authors' cases, against a plain restatement that scores pair by pair."""

import math

import pytest
import torch
from parity.case import load_case
from parity.check import check_case
from parity.restated import isa, near_identity, nested, norm, symmetric_loss, unit

SELECTOR = "visual_token_selector.score_predictor"
ALIGNMENTS = ("video_sentence", "sentence_frame", "word_patch")
WORDS, FRAMES, PATCHES, KEPT, D = 5, 3, 6, 2, 8


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def random_checkpoint(generator):
    slots = FRAMES * (1 + KEPT)
    sizes = {"global_mat_weight": D, "global_mat_weight_1": D, "local_mat_weight": D, "local_mat_weight1": D}
    sizes |= {"frame_logit_weight": FRAMES, "word_mat_weight": WORDS, "word_mat_weight2": WORDS}
    sizes |= {"pixel_mat_weight": slots, "pixel_mat_weight2": slots, "word_logit_weight": WORDS}
    shapes = {"in_conv.1": (D // 2, D), "out_conv.0": (D // 2, D), "out_conv.2": (1, D // 2)}
    return (
        {name: near_identity(size, generator) for name, size in sizes.items()}
        | {f"{SELECTOR}.{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        | {f"{SELECTOR}.in_conv.0.{kind}": 1 + 0.2 * torch.randn(D, generator=generator) for kind in ("weight", "bias")}
        | {"clip.logit_scale": torch.tensor([2.0])}
    )


def patch_scores(tokens, state):
    """Scores (P,) of the patches of one frame (1 + P, D), CLS first."""
    inner = [
        gelu(state[f"{SELECTOR}.in_conv.1.weight"] @ norm(t, state, f"{SELECTOR}.in_conv.0", 1e-5)) for t in tokens
    ]
    joined = [gelu(state[f"{SELECTOR}.out_conv.0.weight"] @ torch.cat([local, inner[0]])) for local in inner[1:]]
    return torch.cat([(state[f"{SELECTOR}.out_conv.2.weight"] @ x).tanh() for x in joined])


def alignments(sentence, words, pooled, frames, patches, state, factor):
    """The three scores of one pair; frames (F, D) and patches (F (1 + k), D) as CLIP gives them."""
    first = (unit(sentence) @ state["global_mat_weight"]) @ (pooled @ state["global_mat_weight_1"])
    second = isa(unit(frames) @ unit(sentence), state["frame_logit_weight"], factor)
    matrix = (unit(words) @ state["local_mat_weight"]) @ (patches @ state["patch_matrix"]).T
    per_patch = torch.stack([isa(column, state["word_mat_weight"], factor) for column in matrix.T])
    per_word = torch.stack([isa(row, state["pixel_mat_weight"], factor) for row in matrix])
    third = isa(per_patch, state["pixel_mat_weight2"], factor) + isa(per_word, state["word_mat_weight2"], factor)
    return torch.stack([first, second, third / 2])


def sinkhorn_bias(queue, iterations=4):
    """A bias per column of pseudo scores (queries, items), with the released start and plain exponentials."""
    matrix = (queue - queue.max()).exp()
    columns = 1 / matrix.sum(0)
    for _ in range(iterations):
        rows = 1 / (matrix @ columns)
        columns = 1 / (rows @ matrix)
    return (columns / columns.sum()).log()


def restated(texts, videos, variant, header, temperature, seed):
    """All tensors of a case, in float64 pair by pair."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    checkpoint = random_checkpoint(generator)
    state = {name: tensor.double() for name, tensor in checkpoint.items()}
    trains = variant == "train"
    state["patch_matrix"] = state["local_mat_weight1"] if trains else torch.eye(D).double()
    tokens, noise = random(videos, FRAMES, 1 + PATCHES, D), random(videos * FRAMES, 4, PATCHES)
    mask = (torch.arange(FRAMES) < torch.arange(videos)[:, None] % FRAMES + 1).long()
    inputs = {"tokens": tokens, "video_mask": mask, "frame_embeddings": tokens[:, :, 0].clone()}
    inputs |= {"sentence": random(texts, D), "words": random(texts, WORDS, D)}
    inputs["selector_noise(video*frame,sample,patch)"] = noise
    if header == "seqTransf":
        inputs["temporal_frames"] = random(videos, FRAMES, D)
    related = inputs.get("temporal_frames", inputs["frame_embeddings"]).double()

    scores = nested([patch_scores(f.double(), state) for f in clip] for clip in tokens)
    index = scores.topk(KEPT).indices.sort().values
    kept = torch.cat([torch.zeros_like(index[..., :1]), 1 + index], -1)  # the CLS token first
    selected = tokens.double().gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, D)).flatten(1, 2)
    pooled = [unit(unit(clip)[there.bool()].mean(0)) for clip, there in zip(related, mask, strict=True)]
    of_texts = zip(inputs["sentence"].double(), inputs["words"].double(), strict=True)
    of_videos = list(zip(pooled, tokens[:, :, 0].double(), selected, strict=True))
    parts = nested([alignments(*text, *video, state, 1 / temperature) for video in of_videos] for text in of_texts)
    scale = state["clip.logit_scale"].exp()
    released = parts * torch.cat([scale, scale, torch.ones(1)])
    similarity = released.mean(-1)
    expected = {
        "patch_score(video*frame,patch)": scores.flatten(0, 1),
        "selected_tokens.noise_free": selected,
        **{f"score.{name}.noise_free": released[..., n] for n, name in enumerate(ALIGNMENTS)},
    }
    if trains:
        expected |= {"similarity.noise_free": similarity, "loss.noise_free": symmetric_loss(similarity)}
    else:
        items = texts if variant == "eval_v2t" else videos
        queues = {f"queue_score.{name}": 3 * random(texts + videos, items) for name in ALIGNMENTS}
        inputs |= queues
        biases = [sinkhorn_bias(queue.double()) for queue in queues.values()]
        expected |= {f"bias.{name}": bias for name, bias in zip(ALIGNMENTS, biases, strict=True)}
        added = [bias[:, None] if variant == "eval_v2t" else bias for bias in biases]
        corrected = torch.stack([released[..., n] + added[n] for n in range(3)]).mean(0)
        expected |= {"similarity_sk_normalised": corrected, "similarity_unnormalised": similarity}
    return (
        {f"checkpoint.{name}": tensor for name, tensor in checkpoint.items()}
        | {f"input.{name}": tensor for name, tensor in inputs.items()}
        | {f"expected.{name}": tensor.float().contiguous() for name, tensor in expected.items()}
        | {"expected.selected_patch_index(video*frame,k)": index.flatten(0, 1)}
    )


@pytest.mark.parametrize(
    ("texts", "videos", "options"),
    [
        (4, 3, {"variant": "train", "sim_header": "seqTransf"}),
        (3, 5, {"variant": "train", "sim_header": "meanP"}),
        (4, 4, {"variant": "train", "sim_header": "meanP", "softmax_temperature": 0.1}),
        (5, 3, {"variant": "eval_t2v", "sim_header": "seqTransf"}),
        (5, 3, {"variant": "eval_v2t", "sim_header": "seqTransf"}),
        (2, 4, {"variant": "eval_v2t", "sim_header": "meanP"}),
        (4, 4, {"variant": "eval_v2t", "sim_header": "seqTransf"}),
    ],
)
def test_ucofia_of_other_sizes_equals_the_restatement(write_case, texts, videos, options):
    options = {"topk": KEPT, "selector_samples": 4, "selector_sigma": 0.05, "softmax_temperature": 0.01} | options
    switches = (options[name] for name in ("variant", "sim_header", "softmax_temperature"))
    tensors = restated(texts, videos, *switches, seed=texts)
    comparisons = check_case(load_case(write_case(tensors, method="ucofia", **options)))
    assert len(comparisons) == sum(name.startswith("expected.") for name in tensors)
    assert comparisons[0].relative < 2e-5, comparisons[0]
