"""Options of CLIP4Clip, X-CLIP and DRL: one kind laid over another, and what a checkpoint keeps of them."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.layers.aggregation import MeanAggregation, SoftmaxAggregation
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods.clip4clip import CLIP4Clip, CLIP4ClipOptions, TightTransf
from tvr_lightning.methods.drl import (
    DRL,
    ChannelDecorrelation,
    DotProduct,
    DRLOptions,
    NoDecorrelation,
    TokenWise,
    WeightedTokenWise,
)
from tvr_lightning.methods.xclip import AOSM, XCLIP, XCLIPOptions
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    synthesize("msrvtt", folder, 12, 0, workers=1, progress=False)
    return folder


@pytest.mark.parametrize(
    ("recipe", "option", "kind"),
    [
        ("clip4clip", "similarity_header", MeanP()),
        ("clip4clip", "similarity_header", SeqLSTM()),
        ("clip4clip", "similarity_header", TightTransf()),
        ("ncl", "similarity_header", SeqTransf()),
        ("xclip", "similarity_header", SeqLSTM()),
        ("xclip", "similarity_aggregation", SoftmaxAggregation()),
        ("xclip", "similarity_aggregation", MeanAggregation()),
        ("drl", "interaction", TokenWise()),
        ("drl", "interaction", DotProduct()),
        ("drl", "temporal_encoder", MeanP()),
        ("drl", "temporal_encoder", SeqLSTM()),
        ("drl", "decorrelation", NoDecorrelation()),
    ],
)
def test_one_kind_over_another_has_its_own_options(root, tmp_path, recipe, option, kind):
    section = "clip4clip" if recipe == "ncl" else recipe
    chosen = f"{option}: {{class_path: {type(kind).__name__}}}"
    if option == "interaction":
        chosen += ", decorrelation: {init_args: {tokens: matched}}"
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"model: {{init_args: {{{section}: {{{chosen}}}}}}}\n")
    paths = [RECIPES / f"{recipe}.yaml", RECIPES / "fixture.yaml", overlay]
    model, _ = from_recipe(paths, [f"--data.init_args.root={root}", "--data.init_args.num_workers=0"])
    assert getattr(model.options, option) == kind


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((CLIP4Clip, CLIP4ClipOptions(kind)) for kind in (MeanP(), SeqLSTM(2), SeqTransf(1), TightTransf(1))),
        (XCLIP, XCLIPOptions(SeqLSTM(2), ("frame_word", "video_word"), AOSM(50.0), mask_words=True)),
        (XCLIP, XCLIPOptions(MeanP(), similarity_aggregation=MeanAggregation())),
        (DRL, DRLOptions(WeightedTokenWise(3, "exclude"), SeqTransf(1), ChannelDecorrelation("random", 0.5))),
        (DRL, DRLOptions(TokenWise("exclude"), SeqLSTM(), ChannelDecorrelation("matched"))),
        (DRL, DRLOptions(DotProduct(), MeanP(), NoDecorrelation())),
    ],
)
def test_a_model_built_in_python_loads_again(tmp_path, method, options):
    encoder = TinyClipEncoder(width=64, image_size=16, text_layers=2, vision_layers=1, context_length=12)
    model = method(encoder, words=9, frames=5, **{method.__name__.lower(): options})
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = method.load_from_checkpoint(tmp_path / "model.ckpt", encoder=encoder, weights_only=True)
    assert loaded.options == options
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
