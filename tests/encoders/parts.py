"""Parts of tests of encoders: random clips, weights with OpenAI's names, and the fine-tuning of a recipe."""

import torch

from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import FineTuning, OpenClipEncoder
from tvr_lightning.encoders.clip import build_model, openai_configuration
from tvr_lightning.encoders.weights import load_weights


def random_media(size: int = 32) -> Media:
    """Two clips of three frames (uint8), of which the last one of the second clip is padding."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (2, 3, 3, size, size), dtype=torch.uint8, generator=generator)
    pixels[-1, -1] = 0
    return Media(pixels, torch.tensor([[True, True, True], [True, True, False]]))


def openai_encoder(tensors, encoder_precision="float32", heads=None, **switches):
    """An encoder of any size with OpenAI's names; `heads` of the vision transformer are 64 wide by default."""
    configuration = openai_configuration(tensors)
    if heads is not None:
        configuration["vision_cfg"]["head_width"] = configuration["vision_cfg"]["width"] // heads
    model = build_model(configuration, encoder_precision)
    load_weights(model, tensors, "the state dict")
    return OpenClipEncoder(model, "openai-state-dict", encoder_precision=encoder_precision, **switches)


def patterns(recipe: str) -> FineTuning:
    """Fine-tuning of the encoder in a recipe."""
    return FineTuning(**read_recipe(recipe)["model"]["init_args"]["tuning"]["init_args"])
