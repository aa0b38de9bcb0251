"""Sentence, word, frame and patch features of any open_clip model."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, cast

import open_clip
import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.model import convert_weights_to_fp16
from open_clip.transform import PreprocessCfg
from open_clip.transformer import Attention, ResidualAttentionBlock, Transformer, VisionTransformer
from open_clip.utils import to_2tuple
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.data.batch import Media, Tokens
from tvr_lightning.encoders.base import Encoder, EncoderPrecision, TemporalInitialization, Tower
from tvr_lightning.encoders.compiled import blocks_of, compile_blocks
from tvr_lightning.encoders.lean_blocks import save_activations
from tvr_lightning.encoders.text_towers import encode_text, text_dimension
from tvr_lightning.encoders.token_merging import TempMe, encode_frames, merge_tokens
from tvr_lightning.encoders.tokenizer import ClipTokenizer, Tokenizer
from tvr_lightning.encoders.tuning import untuned_state
from tvr_lightning.encoders.vision_towers import PatchShift, encode_images
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.preparation import Interpolation, ResizeMode
from tvr_lightning.option_types import Role

NO_FLOAT16 = (
    "encoder_precision float16 is defined only for CLIP's own transformers, not for {}. Add --config "
    "recipes/variants/float32.yaml to train in float32"
)


class OpenClipEncoder(Encoder):
    """Encoder around an open_clip model that `ClipEncoder` or `TinyClipEncoder` builds.

    Texts become sentences (N, D) and words (N, W, D), videos frames (M, F, D) and, on request, patches (M, F, P, D).
    The model's own logit scale and bias are removed from the parameters, since the method has a trainable one.

    Args:
        model: `open_clip.CLIP`, `open_clip.CustomTextCLIP` or `open_clip.CoCa`, whose decoder is removed; for
            `float16` built with `cast_dtype=torch.float16`, so that its LayerNorms compute in float32.
        name: name of the architecture, for errors.
        pixels: frame preprocessing that the weights were trained with; by default that of OpenAI's CLIP.
        tokenizer: tokenizer of the text tower; by default CLIP's byte-pair encoding.
        text_mask: mask padding keys in the text transformer in addition to the causal mask (GARE, HBI); otherwise
            padding positions, which count as word features, attend to the caption.
        encoder_precision: `float16` makes the matrices float16 parameters as CLIP's `convert_weights` does, without
            float32 copies and without loss scaling; norms and embeddings stay float32. The released CLIP4Clip family
            trains this way.
        gradient_checkpointing: recompute each block in the backward pass instead of keeping its activations.
        compile_towers: compile the blocks of both transformers with torch.compile, which needs a C++ compiler on a CPU
            and Triton on a GPU; a new batch size triggers recompilation.
        patch_shift: Move patches between neighboring frames in the attention of vision blocks 10 and 11 (UCoFiA).
        token_merging: merge similar tokens within and across the frames of a video; there are then no patches, and
            every video needs the number of frames of the option.
    """

    clip: Any  # open_clip does not type the attributes of its models
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        model: open_clip.CLIP | open_clip.CustomTextCLIP | open_clip.CoCa,
        name: str,
        pixels: PreprocessCfg | None = None,
        tokenizer: Tokenizer | None = None,
        text_mask: bool = False,
        encoder_precision: EncoderPrecision = "float32",
        gradient_checkpointing: Annotated[bool, Role.MACHINE] = False,
        compile_towers: Annotated[bool, Role.MACHINE] = False,
        patch_shift: bool = False,
        token_merging: TempMe | None = None,
    ) -> None:
        super().__init__()
        self.name, self.text_mask, self.encoder_precision = name, text_mask, encoder_precision
        self._initial_logit_scale = float(model.logit_scale.detach())
        self._initial_logit_bias = 0.0 if model.logit_bias is None else float(model.logit_bias.detach())
        for part in ("logit_scale", "logit_bias", "text_decoder"):
            if hasattr(model, part):
                delattr(model, part)
        save_activations(model)
        self.clip = model
        self.tokenizer = tokenizer or ClipTokenizer(int(model.context_length))
        self.context_length, self.text_preparation = self.tokenizer.context_length, self.tokenizer.description
        sides = set(to_2tuple(model.visual.image_size))
        if len(sides) != 1:
            raise UserError(f"architecture {name} needs frames of {sides} pixels; only square frames are supported")
        self.image_size = int(sides.pop())
        self.dimension = text_dimension(self._text)
        pixels = pixels or PreprocessCfg()
        self.resize_mode = cast(ResizeMode, pixels.resize_mode)
        self.interpolation = cast(Interpolation, pixels.interpolation)
        # not persistent: they belong to the recipe, and weights with these names would be the authors' own
        self.register_buffer("pixel_mean", torch.tensor(pixels.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixels.std).view(3, 1, 1), persistent=False)
        if gradient_checkpointing:
            model.visual.set_grad_checkpointing(True)
            tower = self._text.transformer
            if isinstance(self._text, HFTextEncoder):  # whose own switch is deprecated since transformers 5
                getattr(tower, "activation_checkpointing_enable", tower.gradient_checkpointing_enable)()
            else:
                tower.grad_checkpointing = True
        if encoder_precision == "float16":
            if not isinstance(model.visual, VisionTransformer) or isinstance(self._text, HFTextEncoder):
                raise UserError(NO_FLOAT16.format(name))
            convert_weights_to_fp16(model)  # matrices and their biases, but not norms and embeddings
            for module in model.modules():
                if isinstance(module, Transformer):
                    # Positions first, as released, so that sums over tokens are rounded in the same order.
                    module.batch_first = False
                    for block in module.resblocks:
                        block.attn.batch_first = False
        elif encoder_precision != "float32":
            raise UserError(f"encoder_precision is {encoder_precision!r}; expected float32 or float16")
        self.patch_shift = PatchShift(model.visual, name) if patch_shift else None
        self.token_merging = token_merging
        if token_merging is not None:
            if patch_shift:
                raise UserError("encoder.token_merging leaves no patches for encoder.patch_shift. Remove one of them.")
            merge_tokens(model.visual, token_merging, name)
            self.fixed_frames, self.gives_patches = token_merging.frames, False
        if compile_towers:
            compile_blocks([self._text.transformer, model.visual])

    @property
    def _text(self) -> Any:
        return self.clip if isinstance(self.clip, open_clip.CLIP) else self.clip.text

    @override
    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        return self.encode_tokenized(self.tokenizer.encode(captions, words), words)

    @override
    def caption_tokens(self, words: int) -> Callable[[list[str]], Tokens]:
        return partial(self.tokenizer.encode, words=self.positions(words))

    @override
    def encode_tokenized(self, tokens: Tokens, words: int) -> TextFeatures:
        self.tokenizer.report_truncated(tokens)
        tokens = tokens.to(self.pixel_mean.device, non_blocking=True)
        return self.encode_tokens(tokens.ids, tokens.mask)

    def encode_tokens(self, ids: Tensor, mask: Tensor | None = None) -> TextFeatures:
        """Encode ids (N, W) and their mask (by default CLIP's, up to EOT) to sentence (N, D) and words (N, W, D)."""
        if mask is None:  # EOT has the largest ID of CLIP's vocabulary
            mask = torch.arange(ids.shape[1], device=ids.device) <= ids.argmax(dim=-1, keepdim=True)
        sentence, words = encode_text(self._text, ids, mask.bool(), self.text_mask, self.tokenizer.pad_id)
        return TextFeatures(sentence, words, mask.bool()).float()  # as the authors' `.float()` on encoder outputs

    @override
    def encode_media(self, media: Media, patches: bool = False) -> VideoFeatures:
        assert isinstance(media.pixels, Tensor)
        pixels = media.pixels.to(self.pixel_mean.device, non_blocking=True)
        if pixels.dtype not in (torch.uint8, torch.float16):
            raise UserError(f"pixels are {pixels.dtype}; expected uint8 or float16 from 0 to 255")
        frame_mask = media.frame_mask.to(pixels.device)
        # Padded frames are zero after normalization, as in the released loaders: the mean color, not black.
        normalized = self._normalized(pixels).masked_fill_(~frame_mask[:, :, None, None, None], 0.0)
        return self.encode_pixels(normalized, frame_mask, patches)

    def _normalized(self, pixels: Tensor) -> Tensor:
        """Return (pixels / 255 - mean) / std in the precision of the step, reading and writing the pixels once."""
        device = pixels.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.pixel_mean.dtype
        normalized = torch.empty(pixels.shape, dtype=dtype, device=pixels.device)
        return torch.addcmul(-self.pixel_mean / self.pixel_std, pixels, 1 / (255 * self.pixel_std), out=normalized)

    def encode_pixels(self, pixels: Tensor, frame_mask: Tensor, patches: bool = False) -> VideoFeatures:
        """Encode normalized frames (M, F, 3, S, S) and, on request, their patches (`vision_towers`).

        Padded frames are encoded like the others, as in CLIP4Clip: some released methods attend to them.
        """
        if pixels.shape[2:] != (3, self.image_size, self.image_size):
            raise UserError(
                f"frames are {tuple(pixels.shape[2:])}, but the encoder needs (3, {self.image_size}, "
                f"{self.image_size}). Set the data's image_size to the encoder's."
            )
        if self.token_merging is not None:
            if pixels.shape[1] != self.fixed_frames:
                raise UserError(
                    f"encoder.token_merging merges the tokens of {self.fixed_frames} frames, but the videos have "
                    f"{pixels.shape[1]}. Set data.init_args.frames to {self.fixed_frames}."
                )
            return VideoFeatures(encode_frames(self.clip.visual, pixels), frame_mask.bool()).float()
        if self.patch_shift is not None:
            self.patch_shift.frames = pixels.shape[1]
        frames, cells = encode_images(self.clip.visual, pixels, patches)
        return VideoFeatures(frames, frame_mask.bool(), cells).float()

    @override
    def temporal_initialization(self, layers: int) -> TemporalInitialization | None:
        if isinstance(self._text, HFTextEncoder):
            return None
        blocks = list(self._text.transformer.resblocks)
        width = self._text.positional_embedding.shape[1]
        if width != self.dimension or not all(type(block) is ResidualAttentionBlock for block in blocks):
            return None
        if layers > len(blocks):
            raise UserError(f"{layers} temporal layers were requested, but the text transformer has only {len(blocks)}")
        states = [{key: value.float().clone() for key, value in untuned_state(b).items()} for b in blocks[:layers]]
        embedding = self._text.positional_embedding.detach().float().clone()
        return TemporalInitialization(states, embedding, int(blocks[0].attn.num_heads))

    @override
    def initial_logit_scale(self) -> float:
        return self._initial_logit_scale

    @override
    def initial_logit_bias(self) -> float:
        return self._initial_logit_bias

    @override
    def blocks(self, tower: Tower) -> list[nn.Module]:
        return blocks_of(self._text.transformer if tower == "text" else self.clip.visual)

    @override
    def configuration(self) -> dict[str, object]:
        modules = list(self.clip.modules())
        found: dict[str, object] = {
            "activations": sorted({type(m).__name__ for m in modules if type(m).__name__.endswith("GELU")}),
            "heads": [m.num_heads for m in modules if isinstance(m, nn.MultiheadAttention | Attention)],
            "preparation": self.preparation.describe(),
            "mean": self.pixel_mean.flatten().tolist(),
            "std": self.pixel_std.flatten().tolist(),
            "tokenizer": self.tokenizer.description,
            "text_mask": self.text_mask,
            "encoder_precision": self.encoder_precision,
            "padded_frames": "zero after normalization",
            "patch_shift": self.patch_shift is not None,
            "token_merging": repr(self.token_merging),
        }
        if isinstance(self._text, HFTextEncoder):
            names, tower = ("num_heads", "num_attention_heads"), self._text
            heads = sorted({int(getattr(m, name)) for m in tower.modules() for name in names if hasattr(m, name)})
            found["text"] = (tower.config.model_type, type(tower.pooler).__name__, heads)
        if not isinstance(self.clip.visual, VisionTransformer):
            found["vision_heads"] = [m.num_heads for m in self.clip.visual.modules() if hasattr(m, "num_heads")]
        return found

    @classmethod
    @override
    def check_trainer(
        cls, precision: str, strategy: str, *, encoder_precision: EncoderPrecision = "float32", **options: Any
    ) -> None:
        if encoder_precision != "float16":
            return
        sharded = any(part in strategy.lower() for part in ("fsdp", "model_parallel", "modelparallel", "deepspeed"))
        if precision not in ("32-true", "32") or sharded:
            found = f"strategy {strategy}" if sharded else f"trainer.precision {precision}"
            raise UserError(
                f"encoder_precision float16 trains CLIP's own float16 weights under trainer.precision 32-true, on one "
                f"device or with DDP, not with {found}. Add --config recipes/variants/float32.yaml to train in float32"
            )
