"""A value that changes whenever an encoder's features could."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn


def fingerprint(configuration: Mapping[str, object], module: nn.Module) -> str:
    """Hexadecimal SHA-256 of a configuration and of all weights and buffers of a module.

    Sharded weights are gathered, so every rank must call it.

    Args:
        configuration: what besides the weights changes the features, by name.
        module: whose state counts: tensors of any shape, scalars included.
    """
    digest = hashlib.sha256()
    for key, value in sorted(configuration.items()):
        digest.update(f"{key}={value!r};".encode())
    for name, tensor in sorted(module.state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole = cast(Tensor, whole).detach().cpu().contiguous()
        digest.update(f"{name}:{whole.dtype}:{tuple(whole.shape)};".encode())
        # numpy knows no bfloat16, so the bytes are read as such
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
