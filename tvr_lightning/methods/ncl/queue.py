"""A first-in-first-out queue of features that is saved with the weights, so that a resumed run is exact."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.features import FeatureBatch

R = TypeVar("R", bound=FeatureBatch)
PREFIX = "stored_"


class FeatureQueue(nn.Module):
    """Queue of the last K records (NCL, section 3.4), stored as buffers of K rows, such as (K, D).

    The buffers are created with the first record, which determines their fields, or from a checkpoint.
    """

    position: Tensor
    filled: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("filled", torch.zeros(1, dtype=torch.int64))

    def __len__(self) -> int:
        """Return the number of stored records, at most K."""
        return int(self.filled)

    @torch.no_grad()
    def push(self, records: FeatureBatch) -> None:
        """Append B records and drop the oldest ones that exceed the capacity."""
        values = {field.name: getattr(records, field.name) for field in dataclasses.fields(records)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if not self._stored():
            for name, tensor in tensors.items():
                self.register_buffer(PREFIX + name, tensor.new_zeros((self.capacity, *tensor.shape[1:])))
        stored = self._stored()
        count = len(records)
        kept = min(len(records), self.capacity)
        places = (self.position + torch.arange(count - kept, count, device=self.filled.device)) % self.capacity
        for name, tensor in tensors.items():
            stored[name][places] = tensor[count - kept :].detach().to(stored[name].device)
        self.position.copy_((self.position + count) % self.capacity)
        self.filled.copy_((self.filled + count).clamp(max=self.capacity))

    def records(self, kind: type[R]) -> R:
        """Return the stored records, oldest first."""
        start = int(self.position) - len(self)
        places = torch.arange(start, start + len(self), device=self.filled.device) % self.capacity
        return kind(**{name: tensor[places] for name, tensor in self._stored().items()})

    def adopt(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """Create buffers with the shapes of a state dict, and remove all others, so that it can be loaded."""
        start = prefix + PREFIX
        for name in self._stored():
            if start + name not in state:
                delattr(self, PREFIX + name)
        for name, tensor in state.items():
            if name.startswith(start):
                room = torch.zeros((self.capacity, *tensor.shape[1:]), dtype=tensor.dtype, device=self.filled.device)
                self.register_buffer(name.removeprefix(prefix), room)

    @override
    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # ModelParallelStrategy loads one existing buffer at a time.
        if {prefix + "position", prefix + "filled"} <= state_dict.keys():
            self.adopt(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _stored(self) -> dict[str, Tensor]:
        return {name.removeprefix(PREFIX): t for name, t in self.named_buffers() if name.startswith(PREFIX)}
