"""Checkpoints of what is trained: the frozen weights of pretrained encoders are replaced by their digest."""

from typing import Any

from torch import nn

from tvr_lightning.encoders.base import FeatureEncoder, fingerprint
from tvr_lightning.training.checkpoints import FROZEN, CheckpointError


def remove_frozen_weights(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Replace frozen weights of encoders by their digest, if most weights of a method are frozen.

    Random weights, and those of encoders that the options do not describe, are kept, since they cannot be loaded again.
    """
    parameters = dict(module.named_parameters())
    frozen = {name: parameter.numel() for name, parameter in parameters.items() if not parameter.requires_grad}
    if 2 * sum(frozen.values()) <= sum(parameter.numel() for parameter in parameters.values()):
        return
    encoders = [name for name, part in module.named_modules() if isinstance(part, FeatureEncoder)]
    pretrained = tuple(f"{name}." for name in encoders if _is_pretrained(checkpoint.get("hyper_parameters", {}), name))
    state = checkpoint["state_dict"]  # with FSDP2, only that of the first process has tensors
    removed = {name: state.pop(name) for name in frozen if name.startswith(pretrained) and name in state}
    if removed:
        checkpoint[FROZEN] = fingerprint({}, removed)


def add_frozen_weights(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Complete a checkpoint with the frozen weights of a module, which was built as for a new training.

    Raises:
        CheckpointError: These are not the weights that the checkpoint was trained with.
    """
    missing = {name: value for name, value in module.state_dict().items() if name not in checkpoint["state_dict"]}
    if fingerprint({}, missing) != checkpoint[FROZEN]:
        raise CheckpointError(
            "the checkpoint contains only what was trained, and the frozen weights of this encoder are not those of "
            "its training. Set encoder.weights to the file or tag, and encoder_precision to the value, of the training."
        )
    checkpoint["state_dict"] = {**checkpoint["state_dict"], **missing}


def _is_pretrained(options: dict[str, Any], encoder: str) -> bool:
    """Return whether the options of a module name the weights of one of its encoders, such as `method.encoder`."""
    for name in encoder.split("."):
        section = options.get(name)
        options = (section.get("init_args") or {}) if isinstance(section, dict) else {}
    return any(options.get(name) not in (None, "none") for name in ("weights", "trained_in"))
