"""Imports of a command, which take seconds once torch is among them."""

from collections.abc import Iterator
from contextlib import contextmanager

from tvr_lightning.runs.log import quieten


@contextmanager
def loading(command: str) -> Iterator[None]:
    """Show that a command is loading if it takes long, then hide the tips and device messages of Lightning."""
    from tvr_lightning.progress import shown

    with shown(f"{command}: loading"):
        yield
    quieten()


def chosen_device(name: str | None) -> str:
    """Return a device by name, or a GPU if available."""
    import torch

    return name or ("cuda" if torch.cuda.is_available() else "cpu")
