"""Sentence, word, frame and patch features of any open_clip model with a CLIP text transformer."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

import open_clip
import torch
from open_clip.transformer import Attention, ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders.base import Encoder, EncoderPrecision, FreezeRule, TemporalInitialization
from tvr_lightning.encoders.compiled import compile_blocks
from tvr_lightning.encoders.tokenizer import ClipTokenizer, word_mask
from tvr_lightning.features import TextFeatures, VideoFeatures

E = TypeVar("E", bound="OpenClipEncoder")

# What CLIP4Clip trains when it freezes the rest (main_task_retrieval.py, freeze_layer_num 0).
CLIP4CLIP_TRAINED = (
    "transformer.resblocks.",
    "ln_final.",
    "text_projection",
    "visual.transformer.resblocks.",
    "visual.ln_post.",
    "visual.proj",
)


class OpenClipEncoder(Encoder):
    """Wraps a built open_clip model; `ClipEncoder` and `TinyClipEncoder` say how it is built.

    Texts become sentences (N, D) and words (N, W, D), videos frames (M, F, D) and, on request, patches (M, F, P, D).
    The model's own logit scale is taken out of the parameters: a method has the one that trains.

    Args:
        model: `open_clip.CLIP` or `open_clip.CustomTextCLIP`; with `fp16-master` built with `cast_dtype=torch.float16`,
            so that its LayerNorms compute in float32.
        name: of the architecture, for errors.
        mean: per RGB channel, of the pixels in [0, 1] that the weights were trained on.
        std: likewise.
        clean: open_clip's name of the text cleaning.
        text_mask: mask padding keys in the text transformer besides the causal mask (GARE, HBI); the others let
            padding positions, which are word features there, see the caption.
        encoder_precision: `fp16-master` keeps the matrices themselves in half precision as CLIP's `convert_weights`
            does, so that an update below half a unit in the last place is lost; norms and embeddings stay float32.
        gradient_checkpointing: recompute each block in the backward pass instead of keeping its activations.
        compile_towers: compile the blocks of both transformers with torch.compile, which needs a C++ compiler on a CPU
            and Triton on a GPU; batches of a new size compile anew.
        freeze: `clip4clip` trains the blocks, last norms and projections; `conv1` freezes the patch embedding (GARE);
            `all` freezes everything.

    Raises:
        TypeError: the model is neither of the two classes.
        CompilerError: `compile_towers` without a compiler.
        ValueError: a switch does not fit the architecture.
    """

    clip: Any  # open_clip leaves what its models hold untyped
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        model: nn.Module,
        name: str,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        clean: str = "lower",
        text_mask: bool = False,
        encoder_precision: EncoderPrecision = "fp32",
        gradient_checkpointing: bool = False,
        freeze: FreezeRule = "none",
        compile_towers: bool = False,
    ):
        super().__init__()
        if not isinstance(model, open_clip.CLIP | open_clip.CustomTextCLIP):
            raise TypeError(
                f"architecture {name} is open_clip's {type(model).__name__}; expected CLIP or CustomTextCLIP"
            )
        self.name, self.text_mask, self.encoder_precision = name, text_mask, encoder_precision
        self._initial_logit_scale = float(model.logit_scale.detach())
        del model.logit_scale
        self.clip = model
        self.tokenizer = ClipTokenizer(int(model.context_length), clean)
        self.context_length = int(model.context_length)
        self.image_size = _side(model.visual, name)
        self.dimension = _dimension(self._text)
        # not persistent: they belong to the recipe, and weights of the same names are then the authors' own
        self.register_buffer("pixel_mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(std).view(3, 1, 1), persistent=False)
        if gradient_checkpointing:
            model.set_grad_checkpointing(True)
        if encoder_precision == "fp16-master":
            if not isinstance(model.visual, VisionTransformer):
                raise ValueError(f"encoder_precision fp16-master is defined for CLIP's vision transformer, not {name}")
            _to_half_masters(model)
        elif encoder_precision != "fp32":
            raise ValueError(
                f"encoder_precision is {encoder_precision!r}; expected one of {get_args(EncoderPrecision)}"
            )
        self.freeze(freeze)
        if compile_towers:
            compile_blocks([self._text.transformer, model.visual])

    @property
    def _text(self) -> Any:
        return self.clip.text if isinstance(self.clip, open_clip.CustomTextCLIP) else self.clip

    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        """Tokenise N captions to `words` positions and encode them; shapes as in `encode_text`.

        Raises:
            ValueError: the model's vocabulary is not CLIP's, or `words` does not fit.
        """
        rows = self._text.token_embedding.num_embeddings
        if rows < self.tokenizer.vocabulary_size:
            raise ValueError(
                f"{self.name} embeds {rows} token ids, CLIP's tokenizer has {self.tokenizer.vocabulary_size}; "
                "pass ids to encode_tokens"
            )
        return self.encode_tokens(self.tokenizer(captions, words).to(self.pixel_mean.device))

    def encode_tokens(self, ids: Tensor, mask: Tensor | None = None) -> TextFeatures:
        """Encode token ids: `ln_final(x) @ text_projection` at every position, the sentence at EOT.

        Args:
            ids: (N, W) int64, `[SOT] tokens [EOT]`, zero-padded; EOT is the largest id.
            mask: (N, W) bool, True where there is a token; None takes the positions up to EOT.

        Returns:
            Features with sentence (N, D), words (N, W, D) of all positions, word_mask (N, W).
        """
        mask = word_mask(ids) if mask is None else mask.bool()
        positions = ids.shape[1]
        if self._text.attn_mask is None and positions < self.context_length:
            # without a causal mask every position sees the padding, so all of it belongs to the computation
            ids = nn.functional.pad(ids, (0, self.context_length - positions))
        text = self._text
        dtype = text.transformer.get_cast_dtype()
        x = text.token_embedding(ids).to(dtype) + text.positional_embedding[: ids.shape[1]].to(dtype)
        x = text.transformer(x, attn_mask=self._attention_mask(mask, ids.shape[1], dtype))
        x = text.ln_final(x)[:, :positions]
        projection = text.text_projection
        if projection is not None:
            x = projection(x) if isinstance(projection, nn.Linear) else x @ projection
        words = _single(x)
        eot = ids[:, :positions].argmax(dim=-1)
        return TextFeatures(words[torch.arange(len(words), device=words.device), eot], words, mask)

    def _attention_mask(self, mask: Tensor, positions: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask, (positions, positions) or, with padding masked, (N heads, positions, positions)."""
        causal = self._text.attn_mask
        causal = None if causal is None else causal[:positions, :positions].to(dtype)
        if not self.text_mask:
            return causal
        keys = torch.zeros(len(mask), positions, dtype=dtype, device=mask.device)
        padding = nn.functional.pad(~mask, (0, positions - mask.shape[1]), value=True)
        keys = keys.masked_fill(padding, float("-inf"))[:, None, :].expand(-1, positions, -1)
        added = keys if causal is None else keys + causal
        return added.repeat_interleave(_heads(self._text.transformer.resblocks[0]), dim=0)

    def encode_media(self, media: Media, patches: bool = False) -> VideoFeatures:
        """Normalise uint8 pixels on the encoder's device and encode them; shapes as in `encode_video`."""
        pixels = media.pixels.to(self.pixel_mean.device, non_blocking=True)
        if pixels.dtype != torch.uint8:
            raise ValueError(f"pixels are {pixels.dtype}; expected uint8, which the encoder normalises itself")
        normalised = (pixels.to(self.pixel_mean.dtype) / 255 - self.pixel_mean) / self.pixel_std
        return self.encode_pixels(normalised, media.frame_mask.to(pixels.device), patches)

    def encode_pixels(self, pixels: Tensor, frame_mask: Tensor, patches: bool = False) -> VideoFeatures:
        """Encode normalised frames: `ln_post(tokens) @ proj`, the frame at CLS, the patches behind it.

        Padded frames are encoded like the others, as CLIP4Clip does: some released methods attend to them.

        Args:
            pixels: (M, F, 3, S, S) float.
            frame_mask: (M, F) bool, True where there is a frame.
            patches: whether to return patch vectors.

        Returns:
            Features with frames (M, F, D), frame_mask (M, F) and patches (M, F, P, D) or None.

        Raises:
            ValueError: another frame size, or patches of an architecture without patch tokens.
        """
        videos, frames = pixels.shape[:2]
        if pixels.shape[2:] != (3, self.image_size, self.image_size):
            raise ValueError(
                f"frames are {tuple(pixels.shape[2:])}, the encoder takes (3, {self.image_size}, {self.image_size}); "
                "set the data's image_size to the encoder's"
            )
        visual = self.clip.visual
        if not _has_class_token(visual):
            if patches:
                raise ValueError(f"{self.name} has no class token beside patch tokens; patches need a CLIP ViT")
            return VideoFeatures(
                _single(visual(pixels.flatten(0, 1))).unflatten(0, (videos, frames)), frame_mask.bool()
            )
        # projected apart and last, so that the features are no views of each other, which sharding warns about
        x = self._vision_tokens(pixels.flatten(0, 1)).unflatten(0, (videos, frames))
        parts = [x[:, :, 0], x[:, :, 1:]] if patches else [x[:, :, 0]]
        parts = [visual.ln_post(part) for part in parts]
        parts = [_single(part if visual.proj is None else part @ visual.proj) for part in parts]
        return VideoFeatures(parts[0], frame_mask.bool(), parts[1] if patches else None)

    def _vision_tokens(self, pixels: Tensor) -> Tensor:
        """Last hidden states (K, 1 + P, width) of (K, 3, S, S) images, CLS first."""
        visual = self.clip.visual
        x = visual.conv1(pixels.to(visual.conv1.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat([visual.class_embedding.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        x = visual.ln_pre(visual.patch_dropout(x + visual.positional_embedding.to(x.dtype)))
        return visual.transformer(x)

    def temporal_initialization(self, layers: int) -> TemporalInitialization | None:
        """First `layers` blocks and positional embedding of the text transformer, as float32 copies.

        Returns:
            None where the blocks are not CLIP's own, or are of another width than the D of the frames.

        Raises:
            ValueError: the text transformer has fewer blocks.
        """
        blocks = list(self._text.transformer.resblocks)
        width = self._text.positional_embedding.shape[1]
        if width != self.dimension or not all(type(block) is ResidualAttentionBlock for block in blocks):
            return None
        if layers > len(blocks):
            raise ValueError(f"{layers} temporal layers asked for, but the text transformer has only {len(blocks)}")
        states = [{key: value.detach().float().clone() for key, value in b.state_dict().items()} for b in blocks]
        embedding = self._text.positional_embedding.detach().float().clone()
        return TemporalInitialization(states[:layers], embedding, _heads(blocks[0]))

    def initial_logit_scale(self) -> float:
        """Logarithm of the temperature factor that came with the weights."""
        return self._initial_logit_scale

    def freeze(self, rule: FreezeRule) -> None:
        """Say which parameters train; each call starts anew.

        Raises:
            ValueError: an unknown rule, or one that the architecture has no layers for.
        """
        if rule not in get_args(FreezeRule):
            raise ValueError(f"freeze is {rule!r}; expected one of {', '.join(get_args(FreezeRule))}")
        if rule in ("clip4clip", "conv1") and not isinstance(self.clip.visual, VisionTransformer):
            raise ValueError(f"freeze {rule} is defined for CLIP's vision transformer; {self.name} has none")
        for name, parameter in self.clip.named_parameters():
            trained = {
                "none": True,
                "all": False,
                "conv1": not name.startswith("visual.conv1."),
                "clip4clip": name.removeprefix("text.").startswith(CLIP4CLIP_TRAINED),
            }
            parameter.requires_grad_(trained[rule])

    def train(self: E, mode: bool = True) -> E:
        """Switch training mode as `nn.Module.train`; batch norms and dropped paths of a frozen encoder stand still."""
        super().train(mode)
        frozen = not any(parameter.requires_grad for parameter in self.clip.parameters())
        if frozen and not isinstance(self.clip.visual, VisionTransformer):  # a CLIP ViT has neither
            self.clip.eval()
        return self

    def configuration(self) -> dict[str, object]:
        """Activations, heads, image size, pixel statistics, text cleaning and the switches that change features."""
        modules = list(self.clip.modules())
        return {
            "activations": sorted({type(m).__name__ for m in modules if type(m).__name__.endswith("GELU")}),
            "heads": [m.num_heads for m in modules if isinstance(m, nn.MultiheadAttention | Attention)],
            "image_size": self.image_size,
            "mean": self.pixel_mean.flatten().tolist(),
            "std": self.pixel_std.flatten().tolist(),
            "clean": self.tokenizer.clean,
            "text_mask": self.text_mask,
            "encoder_precision": self.encoder_precision,
        }

    def check_precision(self, trainer_precision: str, strategy: str) -> None:
        """Refuse mixed precision and sharding with half-precision masters; see `Encoder.check_precision`."""
        if self.encoder_precision != "fp16-master":
            return
        if trainer_precision not in ("32-true", "32"):
            raise ValueError(
                f"encoder_precision fp16-master keeps half-precision weights itself and runs under trainer.precision "
                f"32-true, not {trainer_precision}; set one of the two back"
            )
        if any(part in strategy.lower() for part in ("fsdp", "model_parallel", "modelparallel", "deepspeed")):
            raise ValueError(
                f"encoder_precision fp16-master mixes half and float32 weights, which strategy {strategy} cannot "
                "shard; use ddp, or encoder_precision fp32"
            )


def _single(x: Tensor) -> Tensor:
    """Half precision to float32, as the authors' `.float()` on encoder outputs; float64 stays."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _heads(block: Any) -> int:
    return int(block.attn.num_heads)


def _side(visual: Any, name: str) -> int:
    size = visual.image_size
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise ValueError(f"architecture {name} takes frames of {size} pixels; expected square ones")
    return int(sides.pop())


def _dimension(text: Any) -> int:
    projection = text.text_projection
    if projection is None:
        return int(text.ln_final.weight.shape[0])
    return int(projection.out_features if isinstance(projection, nn.Linear) else projection.shape[1])


def _has_class_token(visual: Any) -> bool:
    return (
        isinstance(visual, VisionTransformer)
        and visual.attn_pool is None
        and visual.pool_type == "tok"
        and not visual.final_ln_after_pool
    )


def _to_half_masters(model: nn.Module) -> None:
    """Matrices and their biases to float16, norms and embeddings left (OpenAI CLIP, `convert_weights`)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.MultiheadAttention | Attention):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.half()
        for name in ("text_projection", "proj"):
            projection = getattr(module, name, None)
            if isinstance(projection, nn.Parameter):
                projection.data = projection.data.half()
