"""Sentences and words of open_clip's text towers: variants of its transformer, and models of transformers."""

from typing import Any

import torch
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, nn

from tvr_lightning.errors import UserError

KEPT_POSITIONS = 20


def encode_text(text: Any, ids: Tensor, mask: Tensor, text_mask: bool, pad_id: int) -> tuple[Tensor, Tensor]:
    """Return the sentences (N, D), as pooled by the tower, and the normalized and projected words (N, W, D).

    Token ids and mask are (N, W). `text_mask` masks padding in open_clip's own transformer (towers of transformers
    always mask it), and `pad_id` fills the positions after W if the tower attends to padding.
    """
    if isinstance(text, HFTextEncoder):  # as its forward, with the projection of pooled vectors at each position
        found = text.transformer(input_ids=ids, attention_mask=mask.long())
        return text.proj(text.pooler(found, mask.long())), text.proj(found.last_hidden_state)
    positions = ids.shape[1]
    summary = getattr(text, "cls_emb", None) is not None
    kind = getattr(text, "text_pool_type", None) or text.pool_type
    if text.attn_mask is None or summary or kind == "last":
        # The tower attends to padding, or ends with a fixed position, so that all positions affect the result.
        ids = nn.functional.pad(ids, (0, text.context_length - positions), value=pad_id)
    if summary:
        x, attention = text._embeds(ids)
    else:
        dtype, length = text.transformer.get_cast_dtype(), ids.shape[1]
        x = text.token_embedding(ids).to(dtype) + text.positional_embedding[:length].to(dtype)
        attention = None if text.attn_mask is None else text.attn_mask[:length, :length].to(dtype)
    if text_mask:
        attention = _hide_padding(text, attention, mask, x)
    x = text.ln_final(text.transformer(x, attn_mask=attention))
    words = _project(text, x[:, :positions])
    if summary or kind == "last":
        return _project(text, x[:, -1]), words
    eos_id = int(text.text_eos_id if hasattr(text, "text_eos_id") else text.eos_id)
    end = {
        "first": torch.zeros_like(ids[:, 0]),
        "eos": ids.eq(eos_id).int().argmax(dim=-1),
        "argmax": ids[:, :positions].argmax(dim=-1),
    }[kind]
    return words[torch.arange(words.shape[0], device=words.device), end], words


def text_dimension(text: Any) -> int:
    """Return the size D of the sentences and words of a text tower."""
    if isinstance(text, HFTextEncoder):
        return int(text.output_dim)
    return _project(text, text.ln_final.weight.detach()).shape[0]


@torch.no_grad()
def lengthen(text: Any, positions: int, name: str) -> None:
    """Give a text transformer more positions, as Long-CLIP does (Zhang et al., ECCV 2024, Section 3.1).

    The first 20 embeddings, which most training captions need, stay the same, and so do the features of texts of up to
    20 tokens. The others are interpolated linearly, and the last ones extrapolated.
    """
    own = getattr(text, "positional_embedding", None)
    kind = getattr(text, "text_pool_type", None) or getattr(text, "pool_type", None)
    fixed_end = getattr(text, "cls_emb", None) is not None or kind == "last"
    if own is None or len(own) <= KEPT_POSITIONS or text.attn_mask is None or fixed_end:
        raise UserError(
            f"encoder.positions needs a causal text transformer with more than {KEPT_POSITIONS} learned positions, "
            f"which {name} does not have. Set it to null."
        )
    if positions < len(own):
        raise UserError(f"encoder.positions is {positions}; it must be at least the {len(own)} positions of {name}")
    kept, rest = own[:KEPT_POSITIONS], own[KEPT_POSITIONS:]
    places = torch.arange(positions - len(kept)) * (len(rest) / (positions - len(kept)))
    left = places.long().clamp(max=len(rest) - 2)
    share = (places - left).unsqueeze(1).to(own)
    text.positional_embedding = nn.Parameter(torch.cat([kept, rest[left].lerp(rest[left + 1], share)]))
    text.attn_mask = torch.full((positions, positions), float("-inf")).triu(1)
    text.context_length = positions


def _project(text: Any, x: Tensor) -> Tensor:
    """Project normalized vectors (..., width) into the space of the frames, or copy them if there is no projection."""
    projection = text.text_projection
    if projection is None:
        return x.clone()
    projected: Tensor = projection(x) if isinstance(projection, nn.Linear) else x @ projection
    return projected


def _hide_padding(text: Any, attention: Tensor | None, mask: Tensor, x: Tensor) -> Tensor:
    """Return an additive attention mask that also excludes padding, (N heads, L, L)."""
    count, length = x.shape[:2]
    heads = text.transformer.resblocks[0].attn.num_heads
    hidden = nn.functional.pad(~mask, (0, length - mask.shape[1]), value=True)
    if getattr(text, "cls_emb", None) is not None:
        hidden[:, -1] = False
    keys = torch.zeros(count, length, dtype=x.dtype, device=x.device).masked_fill(hidden, float("-inf"))
    keys = keys[:, None, :].expand(-1, length, -1).repeat_interleave(heads, dim=0)
    return keys if attention is None else keys + attention
