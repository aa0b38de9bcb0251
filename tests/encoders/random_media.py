"""Random clips for encoders."""

import torch

from tvr_lightning.data.batch import Media


def random_media(size: int = 32) -> Media:
    """Two clips of three frames (uint8), of which the last one of the second clip is padding."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (2, 3, 3, size, size), dtype=torch.uint8, generator=generator)
    pixels[-1, -1] = 0
    return Media(pixels, torch.tensor([[True, True, True], [True, True, False]]))
