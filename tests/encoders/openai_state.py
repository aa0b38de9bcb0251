"""Encoders with the weights of a state dict with OpenAI's names, in any size."""

from tvr_lightning.encoders import OpenClipEncoder
from tvr_lightning.encoders.clip import build_model, openai_configuration
from tvr_lightning.encoders.weights import load_weights


def openai_encoder(tensors, encoder_precision="float32", heads=None, **switches):
    """Return the encoder; `heads` of the vision transformer are 64 wide by default, as in CLIP."""
    configuration = openai_configuration(tensors)
    if heads is not None:
        configuration["vision_cfg"]["head_width"] = configuration["vision_cfg"]["width"] // heads
    model = build_model(configuration, encoder_precision)
    load_weights(model, tensors, "the state dict")
    return OpenClipEncoder(model, "openai-state-dict", encoder_precision=encoder_precision, **switches)
