"""GAID's checkpoints (YangBowenn/GAID, model/clip_stochastic.py) and parity cases."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.authors.huggingface import with_openai_names
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.wav2vec2 import Wav2Vec2Encoder
from tvr_lightning.encoders.whisper import WhisperEncoder
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.gaid import GAID, GAIDOptions, GatedFusion
from tvr_lightning.methods.gaid.model import GAIDHead, branch_losses
from tvr_lightning.methods.released import score_gaid
from tvr_lightning.methods.xpool import XPoolOptions
from tvr_lightning.parity.case import ParityCase, ParityError
from tvr_lightning.parity.encoder import CLIP_NAMES, clip_encoder
from tvr_lightning.parity.tmass import UNUSED, WEIGHTED, check_frames
from tvr_lightning.parity.xpool import case_attention, case_scale, check_words, embedded, load

HEAD_NAMES = (
    ("pool_frames.", "attention."),
    ("gate_fc.", "gate.linear."),
    ("stochastic.std_branch.linear_proj.", "radius.linear_proj."),
    ("stochastic.alpha", "alpha"),
)
NAMES = NameMap(
    (*CLIP_NAMES, *((theirs, f"head.{ours}") for theirs, ours in HEAD_NAMES), ("linear.", "audio_projection.")), UNUSED
)


def import_gaid(
    checkpoint: Mapping[str, Tensor],
    source: str,
    words: int = 32,
    frames: int = 12,
    audio_encoder: AudioEncoder | None = None,
    heads: int = 1,
) -> GAID:
    """Build GAID from an authors' checkpoint; what shapes do not tell comes as arguments.

    Args:
        checkpoint: tensors by the authors' names, CLIP's by OpenAI's or transformers' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for; the checkpoint's layer of the radius, (D, F), is tied to it.
        audio_encoder: whose features it was trained on; authors' checkpoints do not hold it. By default the released
            one of the width that the checkpoint takes: Whisper base (512) or wav2vec 2.0 base (768).
        heads: attention heads (released: 1).

    Raises:
        ParityError: another method's checkpoint, unexpected or missing names, another number of frames, too many words,
            or an audio encoder of another width.
        MissingWeightsError: the audio encoder's weights are not where it looks for them.
    """
    check_family("gaid", checkpoint, source)
    checkpoint = with_openai_names(checkpoint, source)
    check_frames(checkpoint, frames, source)
    encoder = clip_encoder(checkpoint, source)
    check_words(words, encoder.context_length, source)
    projection = checkpoint.get("linear.weight")
    width = encoder.dimension if projection is None else projection.shape[1]
    audio_encoder = audio_encoder or _released_audio_encoder(width, source)
    if audio_encoder.dimension != width:
        raise ParityError(
            f"{source}: it was trained on audio vectors of {width} dimensions, {type(audio_encoder).__name__} gives "
            f"{audio_encoder.dimension}"
        )
    module = GAID(
        encoder,
        words=words,
        frames=frames,
        audio_encoder=audio_encoder,
        gaid=released_options(XPoolOptions(heads)),
    )
    state = module.state_dict()
    sound = {name: tensor for name, tensor in state.items() if name.startswith("audio_encoder.")}
    expected = {name: tensor for name, tensor in state.items() if name not in sound}
    module.load_state_dict(rename(checkpoint, NAMES, expected, source) | sound)
    return module.eval()


def released_options(attention: XPoolOptions) -> GAIDOptions:
    """Return the options of the released training."""
    return GAIDOptions(fusion=GatedFusion(text="paired"), loss_weighting="released", attention=attention)


def _released_audio_encoder(width: int, source: str) -> AudioEncoder:
    if width == 512:
        return WhisperEncoder("base")
    if width == 768:
        return Wav2Vec2Encoder("base")
    raise ParityError(f"{source}: no released audio encoder gives vectors of {width} dimensions; name one in Python")


def compute_gaid(case: ParityCase) -> dict[str, Tensor]:
    """Compute gates, both protocols' scores and the training step of a GAID case.

    Its audio vectors (M, T, D_a) are pooled to the frames as released, each video's own caption is that of its number.
    """
    text, video = embedded(case)
    dimension, frames = video.frames.shape[2], video.frames.shape[1]
    audio = case.input("audio_features")
    if "linear.weight" in case.checkpoint:
        audio = F.linear(audio, case.checkpoint.pop("linear.weight"), case.checkpoint.pop("linear.bias"))
    video.audio = F.adaptive_avg_pool1d(audio.mT, frames).mT
    head = GAIDHead(dimension, frames, released_options(case_attention(case)))
    load(head, case, NameMap(HEAD_NAMES, UNUSED))
    assert head.gate is not None
    by_video, by_text = head.gate.of_video(video), head.gate.of_text(text.sentence)
    count = min(len(text), len(video))
    found = {
        "gate_paired": (by_video[:count] + by_text[:count].unsqueeze(1)).sigmoid().squeeze(-1),
        "gate_pairwise": (by_video.squeeze(-1) + by_text.unsqueeze(1)).sigmoid(),
        "similarity_as_released": score_gaid(head, text, video, text[: len(video)], None).similarity,
        "similarity_query_conditioned": head(text, video).similarity,
    }
    return found | (_training(case, head, text[:count], video[:count]) if "sigma" in case.inputs else {})


def _training(case: ParityCase, head: GAIDHead, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
    scale = case_scale(case)
    cosines = head.train_cosines(text, video, case.input("sigma")[: len(text)])
    perturbation, support = branch_losses(cosines, scale, "released")
    totals = {name: perturbation + support * float(name[len(WEIGHTED) :]) for name in case.expected if WEIGHTED in name}
    return {
        "train.similarity": cosines[0],
        "train.support_similarity": cosines[1],
        "loss.perturbation": perturbation,
        "loss.support": support,
        **totals,
    }
