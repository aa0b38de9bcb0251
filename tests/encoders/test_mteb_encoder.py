"""Models of MTEB give the same vectors as MTEB's own evaluation of the same files."""

import re
import shutil

import numpy as np
import pytest
import torch
from search_parts import write_clip
from tiny_transformers import XCLIP, save_tiny_captioner, save_tiny_xclip

from tvr_lightning.config.recipe_files import RECIPES, read_recipe
from tvr_lightning.data import VideoFolder
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import Frozen, MissingWeightsError, MTEBEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.media.clip_file import ClipFile
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.video import read_clip
from tvr_lightning.methods import CLIP4Clip, XPool
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.checkpoints import named_code

mteb = pytest.importorskip("mteb")
# Dependencies of MTEB warn about each other when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WRAPPERS = {
    "xclip": XCLIP,
    "gve": "mteb.models.model_implementations.gve_models.GVEWrapper",
}
CAPTIONS = ["a red circle moves left", "star"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_tiny_xclip(root / "xclip", CAPTIONS)
    template = (
        "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for c in m['content'] %}{% if c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
        "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    )
    save_tiny_captioner(root / "gve", template)
    return {name: str(root / name) for name in WRAPPERS}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [write_clip(folder / f"{number}.mp4", number, frames=12) for number in range(4)]


def files(clips):
    return Media([ClipFile(clip) for clip in clips], torch.ones(len(clips), 2, dtype=torch.bool))


class AllFrames:
    """A decoder in memory with every frame of a file, as torchcodec gives them."""

    def __init__(self, path):
        self.frames = read_clip(path, 12, np.asarray, "segment-centers").pixels
        self.metadata = type("Metadata", (), {"num_frames": 12, "end_stream_seconds": 3.0})

    def get_frames_at(self, indices):
        return type("Frames", (), {"data": self.frames[indices]})


class Rows(list):
    """Rows with the columns that MTEB's wrappers look up."""

    def __init__(self, column, values):
        super().__init__({column: value} for value in values)
        self.features = {column: None}


def theirs(encoder, column, values):
    """Vectors of MTEB's wrapper of one input at a time."""
    from mteb.types import PromptType

    prompt = PromptType.query if column == "text" else PromptType.document
    loader = torch.utils.data.DataLoader(Rows(column, values), 1, collate_fn=lambda rows: {column: [rows[0][column]]})
    found = encoder._wrapper.encode(
        loader, task_metadata=encoder.task, hf_split="test", hf_subset="default", prompt_type=prompt
    )
    return torch.as_tensor(np.asarray(found)).float()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_vectors_equal_those_of_mteb_and_depend_on_the_order_of_the_frames(kind, folders, clips):
    encoder = MTEBEncoder(folders[kind], wrapper=WRAPPERS[kind], task="MSRVTTT2V")
    text, video = encoder.encode_text(CAPTIONS, 12), encoder.encode_video(files(clips))
    tolerance = {"xclip": 1e-5, "gve": 0.05}[kind]  # batches round differently in bfloat16
    torch.testing.assert_close(text.sentence, theirs(encoder, "text", CAPTIONS), rtol=0, atol=tolerance)
    expected = theirs(encoder, "video", [AllFrames(clip) for clip in clips])
    torch.testing.assert_close(video.frames[:, 0], expected, rtol=0, atol=tolerance)
    assert video.frames.shape == (4, 1, encoder.dimension)
    assert text.words.shape == (2, 1, encoder.dimension)
    assert video.frames[:, 0].std(0).mean() > tolerance
    assert encoder.inputs_used() == {"frames": [{"xclip": 8, "gve": 3}[kind]], "prompt": encoder.task.prompt}
    assert "query" in encoder.task.prompt
    pixels = [torch.from_numpy(np.stack(AllFrames(clip).frames)) for clip in clips]
    times = torch.arange(12).expand(4, 12) / 4.0
    mask = torch.ones(4, 12, dtype=torch.bool)
    in_memory = encoder.encode_video(Media(pixels, mask, times=times)).frames
    torch.testing.assert_close(in_memory, video.frames, rtol=0, atol=tolerance)
    backwards = encoder.encode_video(Media([each.flip(0) for each in pixels], mask, times=times)).frames
    assert (backwards - video.frames).abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_is_loaded_by_name_from_the_cache(folders, clips, tmp_path, monkeypatch):
    name = "microsoft/xclip-base-patch32"
    revision = mteb.get_model_meta(name).revision
    snapshot = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    shutil.copytree(folders["xclip"], snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # without retries for minutes
    encoder, expected = MTEBEncoder(name), MTEBEncoder(folders["xclip"], wrapper=WRAPPERS["xclip"])
    assert torch.equal(encoder.encode_video(files(clips)).frames, expected.encode_video(files(clips)).frames)


def test_a_file_gives_the_frames_of_its_span(clips, tmp_path):
    whole, part = ClipFile(clips[0]), ClipFile(clips[0], (1.0, 2.0))
    assert (whole.metadata.num_frames, whole.metadata.end_stream_seconds) == (12, 3.0)
    assert (part.metadata.num_frames, part.metadata.end_stream_seconds) == (4, 1.0)
    every = AllFrames(clips[0]).frames
    assert torch.equal(whole.get_frames_at([0, 11, 5, 5]).data, every[[0, 11, 5, 5]])
    assert torch.equal(part.get_frames_at([0, 3]).data, every[[4, 7]])
    with pytest.raises(VideoError, match="there is no frame from 5"):
        ClipFile(clips[0], (5.0, 6.0))
    (tmp_path / "broken.mp4").write_bytes(clips[0].read_bytes()[:700])
    with pytest.raises(VideoError):
        ClipFile(tmp_path / "broken.mp4")


def test_a_zero_shot_table_on_a_folder(folders, clips, tmp_path):
    for clip in clips:
        shutil.copy(clip, tmp_path)
    lines = [f"{clip.name},{CAPTIONS[number % 2]} {number},test" for number, clip in enumerate(clips)]
    (tmp_path / "captions.csv").write_text("\n".join(["video,caption,split", *lines]))
    encoder = MTEBEncoder(folders["xclip"], wrapper=WRAPPERS["xclip"])
    options = {"root": str(tmp_path), "split": "table", "num_workers": 0, "resize_mode": "undecoded", "frames": 2}
    method = CLIP4Clip(encoder, tuning=Frozen(), frames=2, words=12)
    quiet_trainer().test(method, datamodule=VideoFolder(**options), verbose=False)
    assert method.evaluation.videos == 4
    with pytest.raises(UserError, match=r"XPool compares frames, but .* gives one vector per video"):
        quiet_trainer().test(XPool(encoder, frames=2, words=12), datamodule=VideoFolder(**options), verbose=False)


def test_models_without_video_weights_or_trust_are_refused_before_they_are_loaded(tmp_path, folders):
    cases = [
        ({"model": "no/model"}, UserError, "MTEB has no model no/model"),
        ({"model": "sentence-transformers/all-MiniLM-L6-v2"}, UserError, "encodes text in MTEB"),
        ({"model": "VLM2Vec/VLM2Vec-V2.0"}, UserError, r"packages that are missing: transformers<5\."),
        ({"model": "microsoft/xclip-base-patch32"}, MissingWeightsError, "xclip-base-patch32 --revision a2e27a78"),
        ({"model": str(tmp_path / "none"), "wrapper": WRAPPERS["xclip"]}, MissingWeightsError, "does not exist"),
        ({"model": folders["xclip"], "wrapper": "nowhere.Wrapper"}, UserError, "cannot be imported"),
        ({"model": folders["xclip"], "wrapper": WRAPPERS["xclip"], "task": "Nothing"}, UserError, "no task Nothing"),
        (
            {"model": folders["xclip"], "wrapper": WRAPPERS["xclip"], "options": {"num_frames": 16}},
            UserError,
            "cannot encode a text and a video",
        ),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            MTEBEncoder(**options)
    trusting = [
        meta.name
        for meta in mteb.get_model_metas(modalities=["video"])
        if meta.loader_kwargs.get("trust_remote_code") and "dense" in meta.model_type and "text" in meta.modalities
    ]
    with pytest.raises(UserError, match="set trust_remote_code: true"):
        MTEBEncoder(trusting[0])
    options = {"encoder": {"class_path": "tvr_lightning.MTEBEncoder", "init_args": {"wrapper": "os.system"}}}
    assert "os" in list(named_code(options))


def test_recipes_name_models_and_revisions_of_mteb():
    recipes = (RECIPES / "backbone").glob("*.yaml")
    found = [path for path in recipes if "MTEBEncoder" in path.read_text(encoding="utf-8")]
    assert len(found) == 4
    for path in found:
        options = read_recipe(path)["model"]["init_args"]["encoder"]["init_args"]
        meta, text = mteb.get_model_meta(options["model"]), path.read_text(encoding="utf-8")
        assert {"text", "video"} <= set(meta.modalities)
        assert re.findall("--revision ([0-9a-f]+)", text) in ([], [meta.revision])
        assert ("trust_remote_code=true" in text) == ("trust_remote_code" in meta.loader_kwargs)
        assert "ot measured" in text
