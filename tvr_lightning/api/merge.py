"""Encoder of a trained method as an open_clip checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import torch
from open_clip import CoCa

from tvr_lightning.api.model import load
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.tuning import AdapterLayers, merge_lora
from tvr_lightning.errors import UserError
from tvr_lightning.training.checkpoints import check_target, write_checkpoint


def merge(checkpoint: str | Path, out: str | Path, trust: Sequence[str] = ()) -> None:
    """Write the encoder of a trained method, with the changes of LoRA, as a file for open_clip's `load_checkpoint`.

    Args:
        checkpoint: Checkpoint or `hf:user/name`, as for `load`.
        out: File to write.
        trust: Modules whose classes the checkpoint may name, as for `load`.

    Raises:
        UserError: `out` is the checkpoint, the encoder is not an open_clip model, or its layers are not open_clip's.
    """
    check_target(Path(out), Path(checkpoint))
    module = load(checkpoint, trust=trust).module
    encoder = module.encoder
    if not isinstance(encoder, OpenClipEncoder) or isinstance(encoder.clip, CoCa):
        raise UserError(f"{checkpoint}: open_clip cannot load {type(encoder).__name__}, or needs CoCa's text decoder.")
    added = any(isinstance(part, AdapterLayers) for part in encoder.modules())
    if added or encoder.patch_shift is not None or encoder.token_merging is not None:
        raise UserError(
            f"{checkpoint}: open_clip has no model with adapters, patch_shift, or token_merging. Tune with LoRA."
        )
    merge_lora(encoder)
    state = {**encoder.clip.state_dict(), "logit_scale": module.temperature.logit_scale.detach().reshape(())}
    if bias := encoder.initial_logit_bias():
        state["logit_bias"] = torch.tensor(bias)
    write_checkpoint(state, Path(out))
