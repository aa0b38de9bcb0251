"""A plain restatement of CLIP and CLIP4Clip, for cases in other sizes than the authors', and of the optimizers."""

import itertools
import math
from dataclasses import dataclass

import torch


@dataclass
class Sizes:
    """Sizes of a random CLIP4Clip."""

    texts: int = 4
    videos: int = 5
    words: int = 7
    frames: int = 3
    dimension: int = 128
    vision: int = 64
    text_layers: int = 2
    vision_layers: int = 1
    temporal_layers: int = 3
    patch: int = 4
    side: int = 12
    context: int = 11
    vocabulary: int = 50
    seed: int = 7


def linear(name, outputs, inputs):
    return {f"{name}weight": (outputs, inputs), f"{name}bias": (outputs,)}


def layer_norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def block_names(prefix, width):
    return (
        linear(f"{prefix}.attn.in_proj_", 3 * width, width)
        | linear(f"{prefix}.attn.out_proj.", width, width)
        | linear(f"{prefix}.mlp.c_fc.", 4 * width, width)
        | linear(f"{prefix}.mlp.c_proj.", width, 4 * width)
        | layer_norm(f"{prefix}.ln_1", width)
        | layer_norm(f"{prefix}.ln_2", width)
    )


def random_checkpoint(sizes, header):
    s = sizes
    shapes = {
        "clip.positional_embedding": (s.context, s.dimension),
        "clip.text_projection": (s.dimension, s.dimension),
        "clip.token_embedding.weight": (s.vocabulary, s.dimension),
        **layer_norm("clip.ln_final", s.dimension),
        "clip.visual.class_embedding": (s.vision,),
        "clip.visual.positional_embedding": ((s.side // s.patch) ** 2 + 1, s.vision),
        "clip.visual.proj": (s.vision, s.dimension),
        "clip.visual.conv1.weight": (s.vision, 3, s.patch, s.patch),
        **layer_norm("clip.visual.ln_pre", s.vision),
        **layer_norm("clip.visual.ln_post", s.vision),
    }
    blocks = [(f"clip.transformer.resblocks.{n}", s.dimension) for n in range(s.text_layers)]
    blocks += [(f"clip.visual.transformer.resblocks.{n}", s.vision) for n in range(s.vision_layers)]
    if header in ("seqTransf", "seqLSTM"):
        shapes["frame_position_embeddings.weight"] = (s.context, s.dimension)
    if header == "seqTransf":
        blocks += [(f"transformerClip.resblocks.{n}", s.dimension) for n in range(s.temporal_layers)]
    if header == "seqLSTM":
        for n, side in itertools.product(range(s.temporal_layers), ("ih", "hh")):
            shapes[f"lstm_visual.weight_{side}_l{n}"] = (4 * s.dimension, s.dimension)
            shapes[f"lstm_visual.bias_{side}_l{n}"] = (4 * s.dimension,)
    if header == "tightTransf":
        shapes["cross.embeddings.position_embeddings.weight"] = (s.context, s.dimension)
        shapes |= layer_norm("cross.pooler.ln_pool", s.dimension)
        shapes |= linear("cross.pooler.dense.", s.dimension, s.dimension) | linear("similarity_dense.", 1, s.dimension)
        blocks += [(f"cross.transformer.resblocks.{n}", s.dimension) for n in range(s.temporal_layers)]
    for prefix, width in blocks:
        shapes |= block_names(prefix, width)
    generator = torch.Generator().manual_seed(s.seed)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in tensors:
        if name.endswith(".weight") and ".ln_" in name:
            tensors[name] += 1
    return tensors | {"clip.logit_scale": torch.tensor(2.5)}


def norm(x, state, name, eps):
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def affine(x, state, name):
    return x @ state[f"{name}weight"].T + state[f"{name}bias"]


def quick_gelu(x):
    return x / (1 + (-1.702 * x).exp())


def block(x, state, name, eps, added):
    """One item (T, D) through a pre-norm block, head by head; `added` (T, T) goes onto the attention logits."""
    width = x.shape[-1]
    q, k, v = affine(norm(x, state, f"{name}.ln_1", eps), state, f"{name}.attn.in_proj_").split(width, -1)
    heads = []
    for start in range(0, width, 64):
        part = slice(start, start + 64)
        weights = (q[:, part] @ k[:, part].T / math.sqrt(min(64, width)) + added).softmax(-1)
        heads.append(weights @ v[:, part])
    x = x + affine(torch.cat(heads, -1), state, f"{name}.attn.out_proj.")
    y = quick_gelu(affine(norm(x, state, f"{name}.ln_2", eps), state, f"{name}.mlp.c_fc."))
    return x + affine(y, state, f"{name}.mlp.c_proj.")


def blocks(x, state, name, layers, eps, added=0.0):
    for n in range(layers):
        x = block(x, state, f"{name}.resblocks.{n}", eps, added)
    return x


def encode_text(state, ids, layers):
    x = state["clip.token_embedding.weight"][ids] + state["clip.positional_embedding"][: len(ids)]
    causal = torch.full((len(ids), len(ids)), -math.inf, dtype=x.dtype).triu(1)
    x = blocks(x, state, "clip.transformer", layers, 1e-5, causal)
    return norm(x, state, "clip.ln_final", 1e-5) @ state["clip.text_projection"]


def encode_frame(state, image, layers):
    kernel = state["clip.visual.conv1.weight"]
    size = kernel.shape[-1]
    tokens = [state["clip.visual.class_embedding"]]
    for top, left in itertools.product(range(0, image.shape[1], size), range(0, image.shape[2], size)):
        tokens.append((kernel * image[:, top : top + size, left : left + size]).sum((1, 2, 3)))
    x = norm(torch.stack(tokens) + state["clip.visual.positional_embedding"], state, "clip.visual.ln_pre", 1e-5)
    x = blocks(x, state, "clip.visual.transformer", layers, 1e-5)
    return norm(x, state, "clip.visual.ln_post", 1e-5)[0] @ state["clip.visual.proj"]


def relate(state, frames, mask, layers):
    """seqTransf on one video (F, D)."""
    x = frames + state["frame_position_embeddings.weight"][: len(frames)]
    added = ((1 - mask) * -1e6).expand(len(frames), -1)
    return frames + blocks(x, state, "transformerClip", layers, 1e-12, added)


def remember(state, frames, mask, layers):
    """seqLSTM on one video (F, D), step by step; padded frames stay as they are."""
    outputs = [frame for frame, there in zip(frames, mask, strict=True) if there]
    for n in range(layers):
        hidden = memory = torch.zeros_like(frames[0])
        steps = []
        for x in outputs:
            gates = state[f"lstm_visual.weight_ih_l{n}"] @ x + state[f"lstm_visual.bias_ih_l{n}"]
            gates = gates + state[f"lstm_visual.weight_hh_l{n}"] @ hidden + state[f"lstm_visual.bias_hh_l{n}"]
            enter, forget, new, leave = gates.chunk(4)
            memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * memory.tanh()
            steps.append(hidden)
        outputs = steps
    padding = [torch.zeros_like(frames[0])] * (len(frames) - len(outputs))
    return frames + torch.stack(outputs + padding)


def tight_logit(state, sentence, frames, mask, layers):
    """tightTransf on one pair: the sentence first, then the real frames."""
    tokens = torch.cat([sentence[None], frames])
    tokens = tokens + state["cross.embeddings.position_embeddings.weight"][: len(tokens)]
    there = torch.cat([torch.ones(1, dtype=mask.dtype), mask]).bool()
    x = blocks(tokens[there], state, "cross.transformer", layers, 1e-12)
    pooled = affine(norm(x[0], state, "cross.pooler.ln_pool", 1e-12), state, "cross.pooler.dense.")
    return affine(quick_gelu(pooled), state, "similarity_dense.")[0]


def nested(rows):
    """Stack lists of lists of tensors."""
    return torch.stack([torch.stack(list(row)) for row in rows])


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def near_identity(size, generator):
    return torch.eye(size) + 0.1 * torch.randn(size, size, generator=generator)


def isa(x, matrix, factor):
    """Interactive similarity aggregation of TC-MGC and UCoFiA."""
    return ((factor * ((factor * x).softmax(0) @ matrix)).softmax(0) * x).sum()


def symmetric_loss(similarity):
    """InfoNCE (1,) of the first B texts and videos."""
    count = min(similarity.shape)
    square = similarity[:count, :count]
    return -(square.log_softmax(1).diagonal() + square.log_softmax(0).diagonal()).mean().reshape(1) / 2


def restated_case(sizes, header):
    """All tensors of a case, computed in float64 item by item."""
    checkpoint = random_checkpoint(sizes, header)
    generator = torch.Generator().manual_seed(sizes.seed + 1)
    ids = torch.zeros(sizes.texts, sizes.words, dtype=torch.int64)
    text_mask = torch.zeros_like(ids)
    for row in range(sizes.texts):
        length = 3 + row % (sizes.words - 2)
        ids[row, 0], ids[row, length - 1] = sizes.vocabulary - 2, sizes.vocabulary - 1
        ids[row, 1 : length - 1] = torch.randint(1, sizes.vocabulary - 2, (length - 2,), generator=generator)
        text_mask[row, :length] = 1
    video = torch.randn(sizes.videos, sizes.frames, 3, sizes.side, sizes.side, generator=generator)
    video_mask = (torch.arange(sizes.frames) < torch.arange(sizes.videos)[:, None] % sizes.frames + 1).long()
    state = {name: tensor.double() for name, tensor in checkpoint.items()}
    words = torch.stack([encode_text(state, row, sizes.text_layers) for row in ids])
    sentence = torch.stack([row[of.argmax()] for row, of in zip(words, ids, strict=True)])
    frames = nested([encode_frame(state, f, sizes.vision_layers) for f in clip] for clip in video.double())
    related = frames
    if header in ("seqTransf", "seqLSTM"):
        layer = relate if header == "seqTransf" else remember
        clips = zip(frames, video_mask, strict=True)
        related = torch.stack([layer(state, clip, there.double(), sizes.temporal_layers) for clip, there in clips])
    pooled = torch.stack([unit(clip)[there.bool()].mean(0) for clip, there in zip(related, video_mask, strict=True)])
    similarity = state["clip.logit_scale"].exp() * unit(sentence) @ unit(pooled).T
    if header == "tightTransf":
        clips = list(zip(frames, video_mask, strict=True))
        similarity = nested([tight_logit(state, s, *clip, sizes.temporal_layers) for clip in clips] for s in sentence)
    expected = {"similarity": similarity, "loss": symmetric_loss(similarity)}
    return (
        {f"checkpoint.{name}": tensor for name, tensor in checkpoint.items()}
        | {"input.input_ids": ids, "input.text_mask": text_mask, "input.video": video, "input.video_mask": video_mask}
        | {"feature.sentence": sentence.float(), "feature.words": words.float(), "feature.frames": frames.float()}
        | {"feature.temporal_frames": related.float()}
        | {f"expected.{name}": tensor.float() for name, tensor in expected.items()}
    )


def released_step(kind, gradient, value, mean, square, group, step):
    """Make one released step in place: modules/optimization.py of CLIP4Clip, or AdamW of transformers."""
    bert, (first, second) = kind.endswith("bert_adam"), group["betas"]
    if bert and group["per_tensor_clip"]:
        gradient = gradient * (group["per_tensor_clip"] / (gradient.norm() + 1e-6)).clamp(max=1.0)
    mean.mul_(first).add_(gradient, alpha=1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    root = square.sqrt().add_(group["eps"])
    if bert:
        update = mean / root
        if group["weight_decay"] > 0:
            update += group["weight_decay"] * value
        value.sub_(group["lr"] * update)
        return
    rate = group["lr"] * (1 - second**step) ** 0.5 / (1 - first**step)
    value.addcdiv_(mean, root, value=-rate)
    if group["weight_decay"] > 0:
        value.add_(value, alpha=-group["lr"] * group["weight_decay"])
