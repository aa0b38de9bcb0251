"""GAID's checkpoints (YangBowenn/GAID, model/clip_stochastic.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.authors.clip import CLIP_NAMES, check_positions, clip_encoder
from tvr_lightning.authors.huggingface import with_openai_names
from tvr_lightning.authors.tmass import UNUSED, check_frames
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.methods.gaid import GAID, GAIDOptions, GatedFusion
from tvr_lightning.methods.xpool import XPoolOptions

NAMES = NameMap(
    (
        ("pool_frames.", "head.attention."),
        # https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/model/clip_stochastic.py#L78-L82
        ("gate_fc.", "head.gate.linear."),
        ("stochastic.std_branch.linear_proj.", "head.radius.linear_proj."),
        ("stochastic.alpha", "head.alpha"),
        ("linear.", "audio_projection."),
    ),
    UNUSED,
)


def import_gaid(
    checkpoint: Mapping[str, Tensor],
    source: str,
    words: int = 32,
    frames: int = 12,
    audio_encoder: AudioEncoder | None = None,
) -> GAID:
    """Build GAID from an authors' checkpoint; the shapes of the tensors determine all sizes.

    Args:
        checkpoint: Tensors by the authors' names, CLIP's by OpenAI's or transformers' names.
        source: Name of the file, for errors.
        words: Text positions W of the method.
        frames: Number of frames F of the method, fixed by the checkpoint's layer of the radius, (D, F).
        audio_encoder: Encoder whose features the checkpoint was trained on. Authors' checkpoints do not contain it: by
            default, a random one of the same width replaces it, and the hyperparameters name the released one, whose
            weights the method then loads with its checkpoint (`GAID.on_load_checkpoint`).

    Raises:
        UserError: The method, names, frames or width of the audio encoder do not match the checkpoint, or there are too
            many words.
    """
    check_family("gaid", checkpoint, source)
    checkpoint = with_openai_names(checkpoint, source)
    check_frames(checkpoint, frames, source)
    encoder = clip_encoder(checkpoint, source)
    check_positions(encoder, source, words, frames)
    projection = checkpoint.get("linear.weight")
    width = encoder.dimension if projection is None else projection.shape[1]
    named = released_audio_encoder(width, source)
    audio_encoder = audio_encoder or TinyWhisperEncoder(width)
    if audio_encoder.dimension != width:
        raise UserError(
            f"{source}: it was trained on {width}-dimensional audio vectors, but {type(audio_encoder).__name__} has "
            f"{audio_encoder.dimension} dimensions"
        )
    module = GAID(
        encoder,
        words=words,
        frames=frames,
        audio_encoder=audio_encoder,
        gaid=released_options(),
    )
    state = module.state_dict()
    sound = {name: tensor for name, tensor in state.items() if name.startswith("audio_encoder.")}
    expected = {name: tensor for name, tensor in state.items() if name not in sound}
    module.hparams["audio_encoder"] = named
    module.load_state_dict(rename(checkpoint, CLIP_NAMES | NAMES, expected, source) | sound)
    return module.eval()


def released_options(attention: XPoolOptions | None = None) -> GAIDOptions:
    """Return the options of the released training."""
    fusion = GatedFusion(text="paired")
    return GAIDOptions(fusion=fusion, loss_weighting="released", attention=attention or XPoolOptions())


def released_audio_encoder(width: int, source: str) -> dict[str, Any]:
    """Return the `audio_encoder:` section of a recipe for features of a given width.

    It is Whisper base (512), wav2vec 2.0 base (768), or a small random encoder if no released encoder has this width.

    Raises:
        UserError: No encoder has features of this width.
    """
    if width == 512:
        return {"class_path": "WhisperEncoder", "init_args": {"size": "base", "weights": "openai"}}
    if width == 768:
        return {"class_path": "Wav2Vec2Encoder", "init_args": {"size": "base", "weights": "facebook"}}
    if width % 4:
        raise UserError(f"{source}: no audio encoder has {width}-dimensional features.")
    return {"class_path": "TinyWhisperEncoder", "init_args": {"width": width, "seed": 0}}
