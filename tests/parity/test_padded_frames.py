"""Scores of videos that lack frames, padded as the released loaders pad them."""

import json

import pytest
import torch
from parity.training import import_case, in_float64, media_of
from safetensors import safe_open

TOLERANCE = {"gare": 1e-6}
"""Largest absolute difference of cosines; other scores have the factor exp(logit_scale) of about 100."""


def test_padded_frames(padded_case):
    with safe_open(padded_case, "pt") as file:
        metadata = file.metadata()
        case = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    method = metadata["method"]
    module, _ = import_case(method, case, json.loads(metadata["config"]), padded_case)
    in_float64(module)
    module.eval()
    media = media_of(case["input.pixels"], case["input.video_mask"])
    with torch.no_grad():
        text = module.encode_text(module.encoder.encode_tokens(case["input.input_ids"].long(), case["input.text_mask"]))
        video = module.encode_video(module.encoder.encode_video(media, patches=module.needs_patches))
        similarity = module.score(text, video).similarity
        if method != "gare":
            similarity = module.logits(similarity)
    difference = float((similarity - case["expected.similarity"].double()).abs().max())
    black = float((similarity - case["expected.similarity_black_frames"].double()).abs().max())
    print(f"\n{padded_case}: {difference:.1e} from the released padding, {black:.1e} from black frames")
    if difference > TOLERANCE.get(method, 1e-4):
        pytest.fail(f"{padded_case}: scores differ by {difference:.1e}", pytrace=False)
