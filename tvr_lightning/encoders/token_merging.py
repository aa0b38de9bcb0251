"""TempMe: merging of similar tokens within and across frames in CLIP's vision tower (Shen et al., ICLR 2025).

Follows the released code (LunarShen/TempMe, commit e624930). The first blocks merge patches within each frame. From
then on, clip blocks join the tokens of neighboring clips of frames into one sequence, which later blocks attend over.
Class tokens are never merged, so that the tower still returns one vector per frame.

Deviations:
- ties: released leaves the order of equal similarities to the sort; here the first token comes first, on all devices.
- precision: released compares tokens in float32, as it trains; here in float32 under bf16 and float16, too.
- trained parameters: paper 0.50 million (abstract); released 507,648, with a vector per clip in each clip block; here
  as released.
- kept tokens: paper keeps R_C = 70 % and R_I = 90 % of the tokens; released removes 30 % and 10 % of all tokens of a
  clip, class tokens included, rounded down, and at most half of the patches; here as released.
- operations: paper 51 % fewer (abstract); released 34 % fewer than CLIP for ViT-B/32 and 24 % for ViT-B/16; here as
  released.
- other settings: paper has results on ActivityNet, DiDeMo, and LSMDC, and with other backbones; released only MSR-VTT;
  here only MSR-VTT has a recipe.
- gradient of the gather: released keeps each device's own slice, so that the encoders get 1 / W of the gradient on W
  devices; here as released, on any number of devices (`gather: own-slice`, `released_devices`).
- selection: released keeps the best test R@1 of evaluations every 150 steps and after each epoch; here uses the weights
  of the last step; `recipes/variants/select-on-test.yaml` selects after epochs.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.option_types import ConfigVariant, Count, Layers, Range

Percent = Annotated[int, Range(at_least=0, at_most=100)]


class TempMe(ConfigVariant):
    """Options of token merging; the defaults are the released ones for MSR-VTT.

    Attributes:
        frames: number of frames F of every video.
        removed_per_frame: tokens that each block before the clip blocks removes from a frame (`tome_r`).
        clip_blocks: indices, from 0, of the blocks that first join clips (`merge_layer`).
        joined: number of neighboring clips that become one, for each clip block (`merge_frame_num`).
        removed_across: percentage of the joined tokens that a clip block removes (paper: 100 - R_C).
        removed_within: percentage of a clip's tokens that it and later blocks remove (paper: 100 - R_I).
        positions: whether each clip block adds a trained vector per clip.
        proportional_attention: whether a token counts in attention as often as tokens have been merged into it.
    """

    frames: Count = 12
    removed_per_frame: Layers = 2
    clip_blocks: tuple[Layers, ...] = (8, 9, 10)
    joined: tuple[Count, ...] = (2, 2, 3)
    removed_across: Percent = 30
    removed_within: Percent = 10
    positions: bool = True
    proportional_attention: bool = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        blocks, joined = list(self.clip_blocks), list(self.joined)
        if not blocks or len(blocks) != len(joined) or blocks != sorted(set(blocks)):
            raise UserError(
                f"TempMe.clip_blocks {blocks} and TempMe.joined {joined} must have the same length, and the blocks "
                "must ascend."
            )
        clips = self.frames
        for count in joined:
            if count < 2 or clips % count:
                raise UserError(
                    f"TempMe.joined {joined}: {clips} clips cannot be joined by {count}. Each number must be at least "
                    f"2 and divide the clips that are left of {self.frames} frames."
                )
            clips //= count


@dataclass(frozen=True)
class BlockTokens:
    """Numbers of tokens in a block.

    Attributes:
        clips: Clips of a video, after joining.
        class_tokens: Class tokens of a clip, after joining; the number of its frames.
        attended: Tokens of a clip in the attention.
        left: Tokens of a clip after the block.
        across: Tokens merged before the attention.
        within: Tokens merged after the attention.
        joined: Clips that the block joins into one; 1 if it joins none.
    """

    clips: int
    class_tokens: int
    attended: int
    left: int
    across: int
    within: int
    joined: int = 1


def token_counts(options: TempMe, blocks: int, patches: int) -> list[BlockTokens]:
    """Return the numbers of tokens in each block of a tower with `patches` patches per frame.

    Raises:
        UserError: There are fewer blocks than the options name, or too few patches to merge.
    """
    if options.clip_blocks[-1] >= blocks:
        raise UserError(
            f"TempMe.clip_blocks names block {options.clip_blocks[-1]}, but the tower has only the blocks 0 to "
            f"{blocks - 1}."
        )
    joined = dict(zip(options.clip_blocks, options.joined, strict=True))
    clips, classes, tokens = options.frames, 1, 1 + patches
    found = []
    for block in range(blocks):
        count = joined.get(block, 1)
        clips, free, tokens = clips // count, (tokens - classes) * count, tokens * count
        classes *= count
        # The shares are of all tokens, with the class tokens, which are never merged.
        across = min(free // 2, int(tokens * (options.removed_across / 100))) if count > 1 else 0
        attended = tokens - across
        if block < options.clip_blocks[0]:
            within = options.removed_per_frame
            if within > free // 2:
                raise UserError(
                    f"TempMe.removed_per_frame is {within}, but block {block} has only {free} patches per frame, of "
                    f"which {free // 2} can be merged."
                )
        else:
            within = min((free - across) // 2, int(attended * (options.removed_within / 100)))
        tokens = attended - within
        found.append(BlockTokens(clips, classes, attended, tokens, across, within, count))
    return found


@torch.no_grad()
def match(tokens: Tensor, classes: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the `count` most similar pairs of every second patch and another one, by the cosine of (R, n, D).

    Return the merged patches (R, m), the most similar one first; the patch (R, m) into which each is merged; and
    the patches that are left in their new order (R, n - m). Patches are numbered without the first `classes` tokens.
    """
    patches = tokens[:, classes:].to(torch.promote_types(tokens.dtype, torch.float32))
    patches = patches / patches.norm(dim=-1, keepdim=True)
    places = torch.arange(patches.shape[1], device=tokens.device)
    movable, fixed = places[classes % 2 :: 2], places[1 - classes % 2 :: 2]
    with torch.autocast(tokens.device.type, enabled=False):
        cosines = patches[:, movable] @ patches[:, fixed].transpose(1, 2)
    nearest = cosines.argmax(dim=-1)
    best = cosines.gather(2, nearest.unsqueeze(-1)).squeeze(-1)
    order = best.sort(dim=1, descending=True, stable=True).indices
    merged, left = order[:, :count], order[:, count:].sort(dim=1).values
    kept = torch.cat([movable[left], fixed.expand(len(tokens), -1)], dim=1)
    return movable[merged], fixed[nearest.gather(1, merged)], kept


def merge(tokens: Tensor, sizes: Tensor, classes: int, chosen: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return tokens (R, n - m, D) and sizes (R, n - m) after merging a `match`, as means weighted by size."""

    def wide(places: Tensor) -> Tensor:
        return places.unsqueeze(-1).expand(-1, -1, tokens.shape[-1])

    sources, targets, left = (places + classes for places in chosen)
    first = torch.arange(classes, device=tokens.device).expand(len(tokens), -1)
    kept = torch.cat([first, left], dim=1)
    weighted = tokens * sizes.unsqueeze(-1)
    sums = weighted.scatter_add(1, wide(targets), weighted.gather(1, wide(sources)))
    counts = sizes.scatter_add(1, targets, sizes.gather(1, sources))
    means = (sums / counts.unsqueeze(-1)).to(tokens.dtype)
    return means.gather(1, wide(kept)), counts.gather(1, kept)


def join(values: Tensor, count: int, classes: int) -> Tensor:
    """Return the values (R, n) or (R, n, D) of `count` neighboring clips as one (R / count, count * n).

    All class tokens come first, `classes` of each clip, and then the patches, clip by clip.
    """
    clips = values.unflatten(0, (-1, count))
    return torch.cat([clips[:, :, :classes].flatten(1, 2), clips[:, :, classes:].flatten(1, 2)], dim=1)


class MergingBlock(nn.Module):
    """Block of CLIP's vision transformer that merges tokens (R, n, D) of R clips; its parameters keep their names.

    Args:
        block: Block whose layers it takes over.
        counts: Numbers of tokens in this block.
        options: Options of token merging.
    """

    ln_1: nn.Module
    attn: nn.MultiheadAttention
    ls_1: nn.Module
    ln_2: nn.Module
    mlp: nn.Module
    ls_2: nn.Module

    def __init__(self, block: ResidualAttentionBlock, counts: BlockTokens, options: TempMe) -> None:
        super().__init__()
        for name, layer in block.named_children():
            self.add_module(name, layer)
        self.counts, self.proportional = counts, options.proportional_attention
        self.clip_positions: nn.Parameter | None = None
        if options.positions and counts.across:
            width = block.ln_1.normalized_shape[0]
            self.clip_positions = nn.Parameter(torch.zeros(1, counts.clips * counts.joined, 1, width))

    @override
    def forward(self, tokens: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens (R, n, D) of all clips and how many patches each stands for (R, n), after merging."""
        counts = self.counts
        if counts.joined > 1:
            tokens, sizes = self._join(tokens, sizes)
        mixed, keys = self._attend(tokens, sizes)
        tokens = tokens + self.ls_1(mixed)
        if counts.within:
            chosen = match(keys, counts.class_tokens, counts.within)
            tokens, sizes = merge(tokens, sizes, counts.class_tokens, chosen)
        return tokens + self.ls_2(self.mlp(self.ln_2(tokens))), sizes

    def _join(self, tokens: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Join neighboring clips, and merge their most similar tokens, compared without the positions of the clips."""
        counts = self.counts
        own = counts.class_tokens // counts.joined
        plain, sizes = join(tokens, counts.joined, own), join(sizes, counts.joined, own)
        if not counts.across:
            return plain, sizes
        chosen = match(plain, counts.class_tokens, counts.across)
        if self.clip_positions is not None:
            clips = tokens.unflatten(0, (-1, self.clip_positions.shape[1]))
            plain = join((clips + self.clip_positions.to(tokens.dtype)).flatten(0, 1), counts.joined, own)
        return merge(plain, sizes, counts.class_tokens, chosen)

    def _attend(self, tokens: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the attention (R, n, D) and the mean key of its heads (R, n, D / H)."""
        projected = linear(self.ln_1(tokens), self.attn.in_proj_weight, self.attn.in_proj_bias)
        query, key, value = projected.unflatten(-1, (3, self.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        counted = sizes.log().to(query.dtype)[:, None, None] if self.proportional else None
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=counted)
        return self.attn.out_proj(mixed.transpose(1, 2).flatten(2)), key.mean(dim=1)


def merge_tokens(visual: Any, options: TempMe, name: str) -> None:
    """Replace the blocks of a vision transformer, in place, by blocks that merge tokens.

    Raises:
        UserError: The tower is not a vision transformer with a class token, or has too few blocks or patches.
    """
    plain = isinstance(visual, VisionTransformer) and visual.attn_pool is None and visual.pool_type == "tok"
    if not plain or not all(type(block) is ResidualAttentionBlock for block in visual.transformer.resblocks):
        raise UserError(f"encoder.token_merging needs a CLIP vision transformer with a class token; {name} has none")
    blocks = visual.transformer.resblocks
    counts = token_counts(options, len(blocks), len(visual.positional_embedding) - 1)
    visual.transformer.resblocks = nn.ModuleList(
        MergingBlock(block, each, options) for block, each in zip(blocks, counts, strict=True)
    )


def encode_frames(visual: Any, pixels: Tensor) -> Tensor:
    """Return the frame vectors (M, F, E) of pixels (M, F, 3, S, S) from a tower that merges tokens."""
    tokens = visual._embeds(pixels.flatten(0, 1).to(visual.conv1.weight.dtype))
    sizes = tokens.new_ones(tokens.shape[:2], dtype=torch.promote_types(tokens.dtype, torch.float32))
    for block in visual.transformer.resblocks:
        if visual.transformer.grad_checkpointing:
            tokens, sizes = checkpoint(block, tokens, sizes, use_reentrant=False)
        else:
            tokens, sizes = block(tokens, sizes)
    frames = tokens[:, : block.counts.class_tokens].reshape(*pixels.shape[:2], -1)
    return visual.ln_post(frames) @ visual.proj
