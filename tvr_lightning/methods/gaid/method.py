"""GAID: Frame-Level Gated Audio-Visual Integration with Directional Perturbation (Yang, Cao, He, Su).

The equations are in `model.py`, in the order of the paper's method section. Defaults are those of the released code
(YangBowenn/GAID, model/clip_stochastic.py, modules/stochastic_module.py, modules/loss.py), except for its evaluation,
which leaks.

Deviations:
- protocol: paper conditions on the query; released fuses AND pools each test video for its OWN caption, so ground truth
  leaks twice; here conditions both on the query. `protocol: as-released` selects the released behavior and marks every
  result with "leaks ground truth".
- gate: paper conditions on the query; released trains it on the matching caption (`fusion.text: paired`); here trains
  the gate on the query, as in evaluation.
- sigma: paper N(0, 1); released U[0, 1); here as released (`prior`).
- text: paper normalizes it; released does not; here as released (`normalize_text`).
- loss: paper plain InfoNCE; released weights it by each pair's own similarity, where a negative one rewards a bad
  match; here as released, but a pair of negative similarity has weight 0 (`loss_weighting`).
- support text: paper "along the variance direction"; released towards the mean of the pooled videos, each dimension as
  far as its radius; here as released.
- temperature: released detaches it, so that it stays CLIP's 100; here as released.
- silence: released passes zeros to wav2vec 2.0, whose projection then adds its bias; here sets the projected audio
  features of silent frames to zero.
- audio of other lengths than 30 s: paper concatenates and resamples longer audio (A.1); released pads and cuts to 30 s;
  here `data.init_args.audio_alignment` decides.
- length of wav2vec 2.0's audio: released encodes the whole track; here encodes the first `data.init_args.audio_seconds`
  of it, also with `audio_alignment: clip30`, and the recipes set 60.
- draws of T-MASS's perturbation (`STP`): released draws separately for every pair; here uses one set of draws per
  evaluation for all pairs, so that a score depends only on its pair.
- several captions per video, as released: released fuses for the first caption and pools for the caption with the
  query's number; here uses the caption with the query's number for both.
- pixels: released resizes float tensors with antialiasing; here rounds them to 8 bits.
- fusion of samples and tokens: paper Table 5; released does not have it; here follows the paper's description.
- optimizer: paper Adam (Table 8); released AdamW; here as released (`optimizer`).
- selection: released selects the best test R@1, ten times per epoch; here uses the weights of the last step;
  `recipes/variants/select-on-test.yaml` selects as released.
- training sentences of LSMDC: released reads `LSMDC16_annos_training_someone.csv`, in which characters have no names;
  here `LSMDC16_annos_training.csv`, with names and the same clips.
- VATEX: released reads subset files of training and validation videos that are not published; here HGR's split with all
  of its clips (25,991 for training, 1,500 for the test).
- last batch: released repeats samples until its devices share them evenly; here the same for the devices of the run, so
  that one device trains on an incomplete batch without repeated samples.
- negatives: released those of a device, one on MSR-VTT and two of 16 pairs on other datasets; here as released, on any
  number of devices (`gather: none`, `released_devices`).
"""

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.data.batch import VideoBatch
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder, WhisperEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.stochastic import trial_draws
from tvr_lightning.methods.base import Protocol, RetrievalModule
from tvr_lightning.methods.gaid.model import GAIDHead, branch_losses
from tvr_lightning.methods.gaid.options import DASP, STP, GAIDOptions, NoFusion
from tvr_lightning.methods.tmass import score_as_released
from tvr_lightning.training.checkpoints import FROZEN

AUDIO = "audio_encoder."
"""Prefix of the audio encoder's tensors."""


class GAID(RetrievalModule):
    """GAID: frames fused with audio by a text-conditioned gate, and texts perturbed along their cross-modal deviation.

    Args:
        encoder: encoder of texts and videos.
        gaid: options of GAID.
        audio_encoder: frozen encoder of the audio; `data.init_args.audio` must name its kind. The default depends on
            the encoder: a TinyWhisperEncoder for a TinyClipEncoder, otherwise Whisper base with OpenAI's weights.
        protocol: evaluation protocol: `query` fuses and pools every video for the query; `as-released` for its own
            caption, which leaks ground truth.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        gaid: GAIDOptions | None = None,
        audio_encoder: AudioEncoder | None = None,
        protocol: Protocol = "query",
        **shared: Any,
    ) -> None:
        super().__init__(encoder, **shared)
        self.options = options = gaid or GAIDOptions()
        fuses = not isinstance(options.fusion, NoFusion)
        if audio_encoder is not None and not fuses:
            raise UserError(
                "audio_encoder conflicts with gaid.fusion: NoFusion, which does not use audio. Remove one of them."
            )
        self.protocol = protocol
        self.head = GAIDHead(encoder.dimension, self.frames, options).within(self.evaluation_config.memory_gib)
        if fuses and audio_encoder is None:
            tiny = isinstance(encoder, TinyClipEncoder)
            audio_encoder = TinyWhisperEncoder(seed=0) if tiny else WhisperEncoder("base", "openai")
        self.audio_encoder = audio_encoder
        self.audio_projection: nn.Linear | None = None
        if self.audio_encoder is not None and self.audio_encoder.dimension != encoder.dimension:
            self.audio_projection = nn.Linear(self.audio_encoder.dimension, encoder.dimension)
        # The released loss detaches it, and distributed training requires a gradient for every trained parameter.
        self.temperature.requires_grad_(False)

    @classmethod
    def required_files(cls, *, encoder: Any, audio_encoder: Any = None, gaid: Any = None, **options: Any) -> list[Path]:
        """Return the files of the default audio encoder of an encoder, if the recipe names none."""
        fusion = None if gaid is None else gaid.get("fusion")
        deaf = fusion is not None and str(fusion.class_path).endswith(NoFusion.__name__)
        if deaf or audio_encoder is not None or encoder.class_path.endswith(TinyClipEncoder.__name__):
            return []
        return WhisperEncoder.required_files(size="base", weights="openai")

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("state_dict")
        # Authors' checkpoints do not contain the audio encoder.
        absent = FROZEN not in checkpoint and not any(name.startswith(AUDIO) for name in state or ())
        if self.audio_encoder is not None and state is not None and absent:
            self.audio_encoder.load_weights()
            state |= {f"{AUDIO}{name}": tensor for name, tensor in self.audio_encoder.state_dict().items()}
        super().on_load_checkpoint(checkpoint)

    @override
    def video_features(self, batch: VideoBatch) -> VideoFeatures:
        video = self.encoder.encode_video(batch.video)
        if self.audio_encoder is not None:
            # https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/model/clip_stochastic.py#L50-L57
            audio, audio_mask = self.audio_encoder.encode_audio(batch.video)
            video = dataclasses.replace(video, audio=audio, audio_mask=audio_mask)
        return self.encode_video(video)

    @override
    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        if self.audio_encoder is None:
            return dataclasses.replace(video, audio=None, audio_mask=None)
        if video.audio is None or video.audio_mask is None:
            raise UserError(
                "gaid.fusion: GatedFusion needs audio, but these videos have none. Set data.init_args.audio to whisper "
                "or wav2vec2 (as the audio encoder), or model.init_args.gaid.fusion to NoFusion."
            )
        audio = video.audio if self.audio_projection is None else self.audio_projection(video.audio)  # (M, F, D)
        return dataclasses.replace(video, audio=audio * video.audio_mask.unsqueeze(-1))

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        return self.head(text, video, self._draws())

    @override
    def score_as_released(self, text: TextFeatures, video: VideoFeatures, own_text: TextFeatures) -> Scores:
        return score_as_released(self.head, text, video, own_text, self._draws())

    def _draws(self) -> Tensor | None:
        options = self.options.perturbation
        if not isinstance(options, STP):
            return None
        return trial_draws(options.prior, options.trials, self.encoder.dimension, self.evaluation_config.seed)

    @override
    def compact_text(self, text: TextFeatures) -> TextFeatures:
        return text.without_words()

    @override
    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        options = self.options.perturbation
        sigma = options.prior.draw(tuple(pairs.text.sentence.shape)) if isinstance(options, DASP | STP) else None
        cosines = self.head.train_cosines(pairs.text, pairs.video, sigma)
        weighting = self.options.loss_weighting
        perturbation, *support = branch_losses(cosines, self.temperature(), weighting, self.contrastive_logits)
        terms = {"perturbation": perturbation}
        if options.support_weight:
            terms["support"] = options.support_weight * support[0]  # lambda L_sup of Eq. 10
        return terms
