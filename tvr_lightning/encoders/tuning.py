"""Choice of the weights of an encoder that are trained, under any method."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from tvr_lightning.encoders.base import Encoder, Tower
from tvr_lightning.encoders.token_merging import MergingBlock
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import ConfigVariant, Count, Dropout, Positive, Role

Target = Literal["query", "key", "value", "output", "mlp"]
TARGETS: dict[Target, str] = {
    "query": r"\b(q|q_proj|query)",
    "key": r"\b(k|k_proj|key)",
    "value": r"\b(v|v_proj|value)",
    "output": r"(\bout_proj|(attn|token_mixer)\.proj|attention\.output\.dense|Attention\.o)",
    "mlp": r"(\bc_fc|\bc_proj|\b(linear_)?fc\d(_\w)?|\b(gate|up|down)_proj|\bwi_\d|\bwo|intermediate\.dense"
    r"|^output\.dense)",
}
"""Names of the linear layers in blocks of open_clip, timm and transformers."""
FUSED = re.compile(r"\b(in_proj_weight|qkv\.weight)$")
"""Names of the weights whose rows are those of query, key, and value."""
FROM_THE_BLOCKS_ON = (
    "*", "!*embed*", "!*.cls_emb", "!*_token", "!*_pre.*", "!*.stem.*", "!*.visual.conv?.*", "!*.visual.bn?.*",
)  # fmt: skip
"""Patterns of everything after the embeddings of words, positions, and pixels, in all open_clip architectures."""


class Tuning(ConfigVariant, ABC):
    """Choice of the weights of an encoder that are trained."""

    rate = "lr"
    """Option of `optimizer` with the learning rate of what is trained in the encoder."""

    @abstractmethod
    def apply(self, encoder: Encoder) -> None:
        """Prepare an encoder for training, in place, with unchanged features."""


class FineTuning(Tuning):
    """Training of the encoder's own weights.

    Attributes:
        train: patterns of the names of the trained parameters, such as `clip.visual.*`. A pattern after `!` excludes
            parameters.
        rate: option of `optimizer` with the learning rate of these parameters.
    """

    train: tuple[str, ...] = ("*",)
    rate: Literal["encoder_lr", "lr"] = "encoder_lr"

    @override
    def apply(self, encoder: Encoder) -> None:
        names = [name for name, _ in encoder.named_parameters()]
        included = [pattern for pattern in self.train if not pattern.startswith("!")]
        excluded = [pattern[1:] for pattern in self.train if pattern.startswith("!")]
        for pattern in included:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"tuning: no parameter of {type(encoder).__name__} matches {pattern}. Its parameters include "
                    f"{', '.join(names[:3])}."
                )
        for name, parameter in encoder.named_parameters():
            matched = any(fnmatchcase(name, pattern) for pattern in included)
            if not matched or any(fnmatchcase(name, pattern) for pattern in excluded):
                parameter.requires_grad_(False)


class Frozen(Tuning):
    """No training of the encoder, only of the method's own layers."""

    @override
    def apply(self, encoder: Encoder) -> None:
        encoder.requires_grad_(False)


class LastBlocks(Tuning):
    """Training of the last blocks of each tower, at `optimizer.encoder_lr`, with the norms and projections after them.

    CLIP4Clip's `freeze_layer_num` N is `blocks: 12 - N`.

    Attributes:
        blocks: number of blocks at the end of each tower that are trained.
    """

    rate = "encoder_lr"
    blocks: Count = 4

    @override
    def apply(self, encoder: Encoder) -> None:
        for _, blocks in _towers(encoder, get_args(Tower)):
            for block in blocks[: -self.blocks]:
                block.requires_grad_(False)
        FineTuning(FROM_THE_BLOCKS_ON).apply(encoder)


class LoRA(Tuning):
    """Training of low-rank changes to weight matrices (Hu et al., ICLR 2022), at `optimizer.lr`.

    A matrix W becomes W + alpha / rank * B A. B starts at zero, so that the features start unchanged.

    Attributes:
        rank: number of rows of A and columns of B.
        alpha: scale of the change, divided by the rank.
        targets: matrices that change: those of the attention's `query`, `key`, `value` and `output`, and of the `mlp`.
        towers: towers whose blocks change.
        dropout: share of the input features that the change ignores in a training step, the same for all tokens.
        shared: whether query, key and value have one A together instead of one each, as in TempMe.
    """

    rank: Annotated[Count, Role.SCORE] = 8
    alpha: Annotated[Positive, Role.SCORE] = 16.0
    targets: Annotated[tuple[Target, ...], Role.SCORE] = ("query", "value")
    towers: Annotated[tuple[Tower, ...], Role.SCORE] = ("text", "video")
    dropout: Dropout = 0.0
    shared: Annotated[bool, Role.SCORE] = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.towers = tuple(dict.fromkeys(self.towers))
        if not (self.targets and self.towers):
            raise UserError("LoRA.targets and LoRA.towers must not be empty. Use Frozen to train nothing.")

    @override
    def apply(self, encoder: Encoder) -> None:
        _freeze_pretrained(encoder)
        with torch.random.fork_rng(devices=[]):  # so that other layers start as without LoRA
            for name, blocks in _towers(encoder, self.towers):
                found = {target for block in blocks for target in self._change(block)}
                if missing := [target for target in self.targets if target not in found]:
                    raise UserError(
                        f"LoRA.targets: {name} has no linear layer for {', '.join(missing)}. Choose other targets or "
                        "towers."
                    )

    def _change(self, block: nn.Module) -> set[Target]:
        """Add changes to the weights of a block, and return the targets that it has."""
        found: set[Target] = set()
        for name, weight in list(block.named_parameters()):
            fused = FUSED.search(name) is not None
            names = get_args(Target)[:3] if fused else get_args(Target)
            targets = [t for t in names if t in self.targets and (fused or re.search(rf"{TARGETS[t]}\.weight$", name))]
            if targets and weight.ndim == 2:
                found.update(targets)
                parts = [names.index(target) for target in targets] if fused else [0]
                if self.shared and not fused:
                    raise UserError("LoRA.shared needs one matrix for query, key and value, as in CLIP's transformers.")
                owner, _, leaf = name.rpartition(".")
                change = LowRank(weight, 3 if fused else 1, parts, self.rank, self.alpha, self.dropout, self.shared)
                parametrize.register_parametrization(block.get_submodule(owner), leaf, change)
        return found


class LowRank(nn.Module):
    """Low-rank change of a weight (R, C), whose rows consist of `count` equal parts.

    Only the `parts` with these indices change, each by B A with A (rank, C) and B (R / count, rank), scaled by
    alpha / rank. The parts may have a `shared` A. Dropout zeroes a share of the columns of A in a training step.
    """

    scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        count: int,
        parts: Sequence[int],
        rank: int,
        alpha: float,
        dropout: float,
        shared: bool,
    ) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.count, self.parts = count, parts
        # float32, also for float16 weights, since small steps would be rounded to zero
        down = torch.empty(1 if shared else len(parts), rank, columns)
        self.down = nn.Parameter(down.uniform_(-(columns**-0.5), columns**-0.5))
        self.up = nn.Parameter(torch.zeros(len(parts), rows // count, rank))
        self.register_buffer("scale", torch.tensor(alpha / rank))  # persistent: features depend on it
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, weight: Tensor) -> Tensor:
        kept = self.dropout(torch.ones_like(self.down[:, :1]))
        changes = self.scale * (self.up @ (kept * self.down))
        rows = list(weight.chunk(self.count))
        for part, change in zip(self.parts, changes, strict=True):
            rows[part] = rows[part] + change.to(weight.dtype)
        return torch.cat(rows)


class Adapter(Tuning):
    """Training of a bottleneck after the MLP of each block (Houlsby et al., ICML 2019), at `optimizer.lr`.

    Its last layer starts at zero, so that the features start unchanged.

    Attributes:
        bottleneck: width of the hidden layer.
        towers: towers whose blocks get an adapter.
    """

    bottleneck: Annotated[Count, Role.SCORE] = 64
    towers: Annotated[tuple[Tower, ...], Role.SCORE] = ("text", "video")

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.towers = tuple(dict.fromkeys(self.towers))
        if not self.towers:
            raise UserError("Adapter.towers must not be empty. Use Frozen to train nothing.")

    @override
    def apply(self, encoder: Encoder) -> None:
        _freeze_pretrained(encoder)
        with torch.random.fork_rng(devices=[]):  # so that other layers start as without adapters
            for name, blocks in _towers(encoder, self.towers):
                for block in blocks:
                    mlp = getattr(block, "mlp", nn.Identity())
                    layers = [part for part in mlp.modules() if isinstance(part, nn.Linear)]
                    if not layers:
                        raise UserError(f"Adapter: the blocks of {name} have no MLP. Use LoRA.")
                    block.adapter = AdapterLayers(layers[-1].out_features, self.bottleneck)
                    mlp.register_forward_hook(block.adapter.after)


class AdapterLayers(nn.Module):
    """Two linear layers with a residual connection, in float32, for vectors (..., width) of any data type."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, hidden), nn.Linear(hidden, width)
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)

    @override
    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.up(nn.functional.gelu(self.down(x.to(self.down.weight.dtype))))
        return x + change.to(x.dtype)

    def after(self, module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        """Apply the adapter to a module's output (..., D), as a forward hook that is copied with the block."""
        return self(output)


def merge_lora(encoder: nn.Module) -> None:
    """Add the changes of LoRA to the weights of an encoder, and remove LoRA from it."""
    for part in list(encoder.modules()):
        for name in list(getattr(part, "parametrizations", ())):
            parametrize.remove_parametrizations(part, name)


def untuned_state(block: nn.Module) -> dict[str, Tensor]:
    """Return the state of a block under its original names, without what a tuning has added."""
    state = {name.removesuffix(".original"): value for name, value in block.state_dict().items()}
    added = re.compile(r"^adapter\.|parametrizations\.\w+\.\d+\.")
    return {name.replace("parametrizations.", ""): value for name, value in state.items() if not added.search(name)}


def _freeze_pretrained(encoder: Encoder) -> None:
    """Freeze all weights of an encoder but the positions that TempMe adds to those of CLIP."""
    encoder.requires_grad_(False)
    for part in encoder.modules():
        if isinstance(part, MergingBlock) and part.clip_positions is not None:
            part.clip_positions.requires_grad_(True)


def _towers(encoder: Encoder, towers: Sequence[Tower]) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the name of each tower, for errors, and its transformer blocks."""
    for tower in towers:
        name, blocks = f"the {tower} tower of {getattr(encoder, 'name', type(encoder).__name__)}", encoder.blocks(tower)
        if not blocks:
            raise UserError(f"tuning: {name} has no transformer blocks. Use FineTuning or Frozen.")
        yield name, blocks
