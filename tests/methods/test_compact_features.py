"""What banks and queues keep of a text and a video scores as the whole does, for every method."""

from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods import GAID, GARE, TMASS, CLIP4Clip, XPool

RECIPES = Path(__file__).parents[2] / "recipes"
N, M, W, F, D = 5, 4, 32, 8, 128


def methods() -> list[str]:
    found = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        model = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("model", {})
        name = model.get("class_path")
        if name not in (None, "VideoQuestionAnswering"):
            found.setdefault(name, path.stem)
    return sorted(found.values())


def build(name: str) -> LightningModule:
    torch.manual_seed(0)
    model = Recipe.parse([RECIPES / f"{file}.yaml" for file in (name, "fixture")]).config.model
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningModule, "model")
    return parser.instantiate(parser.parse_object({"model": model.as_dict()})).model.eval()


@pytest.mark.parametrize("name", methods())
@torch.no_grad()
def test_compact_features_score_as_whole_ones(name):
    method = build(name)
    words = method.words
    text_mask = torch.arange(words) < torch.tensor([[3], [words], [5], [4], [9]])
    text = TextFeatures(torch.randn(N, D), torch.randn(N, words, D), text_mask)
    frame_mask = torch.arange(F) < torch.tensor([[F], [3], [F], [1]])
    sound = getattr(method, "audio_encoder", None)
    video = VideoFeatures(
        torch.randn(M, F, D) * frame_mask[..., None],
        frame_mask,
        patches=torch.randn(M, F, 49, D),
        audio=torch.randn(M, F, sound.dimension if sound is not None else 1),
        audio_mask=frame_mask,
    )
    text, video = method.encode_text(text), method.encode_video(video)
    compact = method.compact_text(text), method.compact_video(video)
    whole = method.score(text, video).similarity
    torch.testing.assert_close(method.score(*compact).similarity, whole, rtol=1e-5, atol=1e-6)
    if type(method) in (CLIP4Clip, GAID, GARE, TMASS, XPool):
        assert compact[0].words.shape[1] == 0
