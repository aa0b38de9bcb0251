"""GAID's checkpoints (YangBowenn/GAID, model/clip_stochastic.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import AuthorsCheckpointError, NameMap, check_family, rename
from tvr_lightning.authors.clip import CLIP_NAMES, check_positions, clip_encoder
from tvr_lightning.authors.huggingface import with_openai_names
from tvr_lightning.authors.tmass import UNUSED, check_frames
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.wav2vec2 import Wav2Vec2Encoder
from tvr_lightning.encoders.whisper import WhisperEncoder
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
    """Build GAID from an authors' checkpoint; every size comes from the tensors' shapes.

    Args:
        checkpoint: tensors by the authors' names, CLIP's by OpenAI's or transformers' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for; the checkpoint's layer of the radius, (D, F), is tied to it.
        audio_encoder: whose features it was trained on; authors' checkpoints do not hold it. By default the released
            one of the width that the checkpoint takes: Whisper base (512) or wav2vec 2.0 base (768).

    Raises:
        AuthorsCheckpointError: another method's checkpoint, unexpected or missing names, another number of frames, too
            many words, or an audio encoder of another width.
        MissingWeightsError: the audio encoder's weights are not where it looks for them.
    """
    check_family("gaid", checkpoint, source)
    checkpoint = with_openai_names(checkpoint, source)
    check_frames(checkpoint, frames, source)
    encoder = clip_encoder(checkpoint, source)
    check_positions(encoder, source, words, frames)
    projection = checkpoint.get("linear.weight")
    width = encoder.dimension if projection is None else projection.shape[1]
    audio_encoder = audio_encoder or _released_audio_encoder(width, source)
    if audio_encoder.dimension != width:
        raise AuthorsCheckpointError(
            f"{source}: it was trained on audio vectors of {width} dimensions, {type(audio_encoder).__name__} gives "
            f"{audio_encoder.dimension}"
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
    module.load_state_dict(rename(checkpoint, CLIP_NAMES | NAMES, expected, source) | sound)
    return module.eval()


def released_options(attention: XPoolOptions | None = None) -> GAIDOptions:
    """Return the options of the released training."""
    fusion = GatedFusion(text="paired")
    return GAIDOptions(fusion=fusion, loss_weighting="released", attention=attention or XPoolOptions())


def _released_audio_encoder(width: int, source: str) -> AudioEncoder:
    if width == 512:
        return WhisperEncoder("base")
    if width == 768:
        return Wav2Vec2Encoder("base")
    raise AuthorsCheckpointError(
        f"{source}: no released audio encoder gives vectors of {width} dimensions; name one in Python"
    )
