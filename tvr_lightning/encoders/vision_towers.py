"""Frames and patches of open_clip's image towers.

A patch is the output of the tower's own head for a single position: norm and projection if a class token or an average
represents the frame, or the value of the attention if an attention pools the positions. Both are then in the space of
the frames, and with a linear head the frame is the mean of its patches.
"""

from typing import Any

from open_clip.timm_model import TimmModel
from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn

from tvr_lightning.errors import UserError

SHIFTED = slice(10, 12)
"""Blocks of the vision transformer whose attention uses shifted patches (UCoFiA, modules/until_module.py)."""
DIVISOR = 7

Features = tuple[Tensor, Tensor | None]


def encode_images(visual: Any, pixels: Tensor, patches: bool) -> Features:
    """Return frames (M, F, D) as the tower encodes pixels (M, F, 3, S, S), and on request positions (M, F, P, D).

    The results are not views, about which sharding would warn.
    """
    if isinstance(visual, VisionTransformer):
        return _vision_transformer(visual, pixels, patches)
    encode = _timm if isinstance(visual, TimmModel) else _resnet
    frames, cells = encode(visual, pixels.flatten(0, 1), patches)
    count = pixels.shape[:2]
    return frames.unflatten(0, count).clone(), None if cells is None else cells.unflatten(0, count).clone()


class PatchShift:
    """Patch shift between neighboring frames before attention (TS2-Net, Liu et al., ECCV 2022; UCoFiA).

    A forward hook of the norms (B, L, D) before the shifted attentions; the residual branch keeps its own tokens. With
    a step of L // 7, tokens 1, 1 + step, ... come from the previous frame and 4, 4 + step, ... from the next.
    """

    def __init__(self, visual: Any, name: str) -> None:
        self.frames = 1  # per video in the next tokens, including padded ones
        is_transformer = isinstance(visual, VisionTransformer) and visual.positional_embedding.shape[0] >= DIVISOR
        shifted = list(visual.transformer.resblocks)[SHIFTED] if is_transformer else []
        if not shifted or not all(type(block) is ResidualAttentionBlock for block in shifted):
            raise UserError(
                f"encoder.patch_shift needs a CLIP vision transformer of at least {SHIFTED.start + 1} blocks and "
                f"{DIVISOR} tokens per frame, which {name} does not have. Set it to false."
            )
        self.transformer = visual.transformer
        for block in shifted:
            block.ln_1.register_forward_hook(self)

    def __call__(self, module: nn.Module, arguments: Any, tokens: Tensor) -> Tensor:
        """Return the shifted tokens, with the same shape."""
        dimension = 0 if self.transformer.batch_first else 1
        clips = tokens.movedim(dimension, 0).unflatten(0, (-1, self.frames))
        step = clips.shape[2] // DIVISOR
        shifted = clips.clone()
        shifted[:, 1:, 1::step] = clips[:, :-1, 1::step]
        shifted[:, :-1, 4::step] = clips[:, 1:, 4::step]
        return shifted.flatten(0, 1).movedim(0, dimension)


def _vision_transformer(visual: Any, pixels: Tensor, patches: bool) -> Features:
    """Return CLIP's `ln_post(tokens) @ proj`; the frame is at CLS, averaged (CLIPA), or pooled by attention (CoCa)."""
    tokens = visual.transformer(visual._embeds(pixels.flatten(0, 1).to(visual.conv1.weight.dtype)))
    x = tokens.unflatten(0, pixels.shape[:2])
    spatial = x[:, :, 1:]
    if visual.attn_pool is not None:
        frames = visual._pool(tokens)[0].unflatten(0, pixels.shape[:2])
        spatial = _attention_values(visual.attn_pool, spatial) if patches else spatial
    elif visual.pool_type == "tok":
        frames = visual.ln_post(x[:, :, 0])
    elif visual.final_ln_after_pool:
        frames = visual.ln_post(spatial.mean(dim=2))
    else:
        frames = visual.ln_post(spatial).mean(dim=2)
    # Projected separately and last, so that the features are not views.
    parts = [frames, visual.ln_post(spatial)] if patches else [frames]
    parts = [part if visual.proj is None else part @ visual.proj for part in parts]
    return parts[0], parts[1] if patches else None


def _attention_values(pool: Any, tokens: Tensor) -> Tensor:
    """Return the output of CoCa's attention for each token alone, (M, F, P, width)."""
    attention: nn.MultiheadAttention = pool.attn
    size = attention.embed_dim
    weight = attention.v_proj_weight if attention.in_proj_weight is None else attention.in_proj_weight[2 * size :]
    values = nn.functional.linear(pool.ln_k(tokens), weight, attention.in_proj_bias[2 * size :])
    projected: Tensor = attention.out_proj(values)
    return projected


def _resnet(visual: Any, pixels: Tensor, patches: bool) -> Features:
    """Return the frames from the attention pool of CLIP's ResNet, and the patches from its values."""
    x = visual.stem(pixels)
    for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        x = layer(x)
    pool = visual.attnpool
    frames = pool(x)
    if not patches:
        return frames, None
    cells = x.flatten(2).transpose(1, 2) + pool.positional_embedding[1:].to(x.dtype)
    return frames, pool.c_proj(pool.v_proj(cells))


def _timm(visual: Any, pixels: Tensor, patches: bool) -> Features:
    """Return the pooled, normalized and projected positions of a timm tower, and the same for each position alone."""
    trunk = visual.trunk
    x = trunk.forward_features(pixels)
    frames = visual.head(trunk.forward_head(x))
    if not patches:
        return frames, None
    if x.ndim == 4:
        channels_last = getattr(trunk, "output_fmt", "NCHW") == "NHWC"
        cells = x.flatten(1, 2) if channels_last else x.flatten(2).transpose(1, 2)
        alone = cells.flatten(0, 1)
        alone = alone[:, None, None, :] if channels_last else alone[:, :, None, None]
    else:
        prefix = int(getattr(trunk, "num_prefix_tokens", 0))
        cells = x[:, prefix:]
        # Repeated because pooling drops as many positions as there are prefix tokens; it maps equal positions to one.
        alone = cells.flatten(0, 1).unsqueeze(1).expand(-1, 1 + prefix, -1)
    return frames, visual.head(trunk.forward_head(alone)).unflatten(0, cells.shape[:2])
