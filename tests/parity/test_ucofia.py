"""UCoFiA in other shapes than the authors' cases, against a plain restatement that scores pair by pair."""

import math

import pytest
import torch
from parity.case import CaseError, load_case
from parity.check import check_case
from parity.restated import norm, unit

SELECTOR = "visual_token_selector.score_predictor"
ALIGNMENTS = ("video_sentence", "sentence_frame", "word_patch")
WORDS, FRAMES, PATCHES, KEPT, D = 5, 3, 6, 2, 8


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def random_checkpoint(generator):
    def near_identity(size):
        return torch.eye(size) + 0.1 * torch.randn(size, size, generator=generator)

    slots = FRAMES * (1 + KEPT)
    sizes = {"global_mat_weight": D, "global_mat_weight_1": D, "local_mat_weight": D, "local_mat_weight1": D}
    sizes |= {"frame_logit_weight": FRAMES, "word_mat_weight": WORDS, "word_mat_weight2": WORDS}
    sizes |= {"pixel_mat_weight": slots, "pixel_mat_weight2": slots, "word_logit_weight": WORDS}
    shapes = {"in_conv.1": (D // 2, D), "out_conv.0": (D // 2, D), "out_conv.2": (1, D // 2)}
    return (
        {name: near_identity(size) for name, size in sizes.items()}
        | {f"{SELECTOR}.{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        | {f"{SELECTOR}.in_conv.0.{kind}": 1 + 0.2 * torch.randn(D, generator=generator) for kind in ("weight", "bias")}
        | {"clip.logit_scale": torch.tensor([2.0])}
    )


def isa(x, matrix, temperature):
    return (((x / temperature).softmax(0) @ matrix / temperature).softmax(0) * x).sum()


def patch_scores(tokens, state):
    """Scores (P,) of the patches of one frame (1 + P, D), CLS first."""
    inner = [
        gelu(state[f"{SELECTOR}.in_conv.1.weight"] @ norm(t, state, f"{SELECTOR}.in_conv.0", 1e-5)) for t in tokens
    ]
    joined = [gelu(state[f"{SELECTOR}.out_conv.0.weight"] @ torch.cat([local, inner[0]])) for local in inner[1:]]
    return torch.cat([(state[f"{SELECTOR}.out_conv.2.weight"] @ x).tanh() for x in joined])


def alignments(sentence, words, pooled, frames, patches, state, temperature):
    """The three scores of one pair; frames (F, D) and patches (F (1 + k), D) as CLIP gives them."""
    first = (unit(sentence) @ state["global_mat_weight"]) @ (pooled @ state["global_mat_weight_1"])
    second = isa(unit(frames) @ unit(sentence), state["frame_logit_weight"], temperature)
    matrix = (unit(words) @ state["local_mat_weight"]) @ (patches @ state["patch_matrix"]).T
    per_patch = torch.stack([isa(column, state["word_mat_weight"], temperature) for column in matrix.T])
    per_word = torch.stack([isa(row, state["pixel_mat_weight"], temperature) for row in matrix])
    third = isa(per_patch, state["pixel_mat_weight2"], temperature)
    third = (third + isa(per_word, state["word_mat_weight2"], temperature)) / 2
    return torch.stack([first, second, third])


def sinkhorn_bias(queue, iterations=4):
    """A bias per column of pseudo scores (queries, items), with the released start and plain exponentials."""
    matrix = (queue - queue.max()).exp()
    columns = 1 / matrix.sum(0)
    for _ in range(iterations):
        rows = 1 / (matrix @ columns)
        columns = 1 / (rows @ matrix)
    return (columns / columns.sum()).log()


def restated(texts, videos, variant="train", header="seqTransf", temperature=0.01, seed=0):
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

    scores = torch.stack([torch.stack([patch_scores(f.double(), state) for f in clip]) for clip in tokens])
    index = scores.topk(KEPT).indices.sort().values
    selected = torch.stack(
        [
            torch.cat([torch.cat([f[:1], f[1:][kept]]) for f, kept in zip(clip, places, strict=True)])
            for clip, places in zip(tokens.double(), index, strict=True)
        ]
    )
    pooled = [unit(unit(clip)[there.bool()].mean(0)) for clip, there in zip(related, mask, strict=True)]
    pairs = [
        [
            alignments(
                sentence.double(),
                words.double(),
                pooled[j],
                tokens[j, :, 0].double(),
                selected[j],
                state,
                temperature,
            )
            for j in range(videos)
        ]
        for sentence, words in zip(inputs["sentence"], inputs["words"], strict=True)
    ]
    parts = torch.stack([torch.stack(row) for row in pairs])
    scale = state["clip.logit_scale"].exp()
    released = parts * torch.cat([scale, scale, torch.ones(1)])
    similarity = released.mean(-1)
    expected = {
        "patch_score(video*frame,patch)": scores.flatten(0, 1),
        "selected_tokens.noise_free": selected,
        **{f"score.{name}.noise_free": released[..., n] for n, name in enumerate(ALIGNMENTS)},
    }
    if trains:
        count = min(texts, videos)
        square = similarity[:count, :count]
        loss = -(square.log_softmax(1).diagonal() + square.log_softmax(0).diagonal()).mean() / 2
        expected |= {"similarity.noise_free": similarity, "loss.noise_free": loss.reshape(1)}
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


def config(**options):
    return {"topk": KEPT, "selector_samples": 4, "selector_sigma": 0.05, "softmax_temperature": 0.01} | options


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
def test_further_cases_hold(write_case, texts, videos, options):
    temperature = options.get("softmax_temperature", 0.01)
    tensors = restated(texts, videos, options["variant"], options["sim_header"], temperature, seed=texts)
    path = write_case(tensors, method="ucofia", **config(**options))
    comparisons = check_case(load_case(path))
    assert len(comparisons) == sum(name.startswith("expected.") for name in tensors)
    assert comparisons[0].relative < 2e-5, comparisons[0]


def test_a_queue_for_neither_texts_nor_videos_is_refused(write_case):
    tensors = restated(5, 3, "eval_v2t")
    for name in ALIGNMENTS:
        tensors[f"input.queue_score.{name}"] = torch.zeros(6, 4)
    path = write_case(tensors, method="ucofia", **config(variant="eval_v2t"))
    with pytest.raises(CaseError, match=r"queue_score\.video_sentence has 4 columns; expected one per text \(5\)"):
        check_case(load_case(path))
