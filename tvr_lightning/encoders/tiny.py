"""CLIP that is small enough to train from scratch on two CPU cores."""

from pathlib import Path
from typing import Annotated, Any

from typing_extensions import override

from tvr_lightning.encoders.base import EncoderPrecision
from tvr_lightning.encoders.clip import build_model
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.pretrained import do_weights_follow
from tvr_lightning.encoders.weights import fitted, read_tensors
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Role

PREFIX = "encoder."  # prefix of the encoder in a run's checkpoint


class TinyClipEncoder(OpenClipEncoder):
    """Small, randomly initialized CLIP with CLIP's own tokenizer, for the synthetic dataset and tests.

    Text width, vision width and D all equal `width`, so that temporal transformers can be initialized from the text
    transformer as with ViT-B/32.

    Args:
        width: width of both transformers and of the features, a multiple of 64 (heads are width // 64 as in CLIP).
        image_size: side of the frames in pixels, a multiple of `patch_size`.
        text_layers: number of blocks of the text transformer.
        vision_layers: number of blocks of the vision transformer.
        patch_size: side of a patch in pixels.
        context_length: maximum number of token positions.
        trained_in: checkpoint of a run of any method whose encoder of this size provides the initial weights; None for
            random weights.
        encoder_precision: same as in `ClipEncoder`.
        switches: other arguments of `OpenClipEncoder`.
    """

    def __init__(
        self,
        width: int = 128,
        image_size: int = 64,
        text_layers: int = 4,
        vision_layers: int = 4,
        patch_size: int = 16,
        context_length: int = 77,
        trained_in: Annotated[str | None, Role.TRAINING, Role.FILE] = None,
        encoder_precision: EncoderPrecision = "float32",
        **switches: Any,
    ) -> None:
        if width <= 0 or width % 64:
            raise UserError(f"TinyClipEncoder.width is {width}; expected a multiple of 64")
        if image_size % patch_size:
            raise UserError(f"TinyClipEncoder.image_size {image_size} must be a multiple of patch_size {patch_size}")
        configuration = {
            "embed_dim": width,
            "vision_cfg": {"width": width, "layers": vision_layers, "patch_size": patch_size, "image_size": image_size},
            "text_cfg": {"width": width, "layers": text_layers, "heads": width // 64, "context_length": context_length},
        }
        model = build_model(configuration, encoder_precision)
        super().__init__(model, "tiny", encoder_precision=encoder_precision, patch_shift=False, **switches)
        for path in self.required_files(trained_in=trained_in):
            state = read_tensors(path)
            own = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
            source = f"TinyClipEncoder.trained_in: the encoder in {path}"
            self.load_state_dict(fitted(own, self.state_dict(), source))

    @classmethod
    @override
    def required_files(cls, *, trained_in: str | None = None, **options: Any) -> list[Path]:
        if trained_in is None or do_weights_follow():
            return []
        path = Path(trained_in)
        if not path.is_file():
            raise MissingWeightsError(
                f"TinyClipEncoder.trained_in: there is no checkpoint {path.absolute()}. Use that of a run, or null."
            )
        return [path]
