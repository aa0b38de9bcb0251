"""Fingerprint of an encoder, which changes with anything that affects its features."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn


def fingerprint(configuration: Mapping[str, object], module: nn.Module) -> str:
    """Return the hexadecimal SHA-256 of a configuration and of all weights and buffers of a module.

    Sharded weights are gathered, so every rank must call it.

    Args:
        configuration: Named settings that affect the features, apart from the weights.
        module: Module with tensors of any shape, including scalars.
    """
    digest = hashlib.sha256()
    for key, value in sorted(configuration.items()):
        digest.update(f"{key}={value!r};".encode())
    for name, tensor in sorted(module.state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole = cast(Tensor, whole).detach().cpu().contiguous()
        digest.update(f"{name}:{whole.dtype}:{tuple(whole.shape)};".encode())
        # numpy does not support bfloat16
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
