"""An index of GAID contains the audio of its videos."""

import dataclasses

import pytest
import torch
from search_parts import find, save_checkpoint
from sound_files import tone, write_clip

from tvr_lightning.encoders import TinyClipEncoder, TinyWav2Vec2Encoder
from tvr_lightning.methods import GAID
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource


@pytest.fixture(scope="module")
def searcher(tmp_path_factory):
    """Three clips with tones and one without an audio track, indexed by a tiny GAID whose gate is open."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "videos").mkdir()
    for name, frequency in (("low", 200.0), ("middle", 800.0), ("high", 3000.0)):
        write_clip(folder / "videos" / f"{name}.mkv", tone(2.0, frequency=frequency))
    write_clip(folder / "videos" / "mute.mkv", None)
    torch.manual_seed(0)
    encoder = {"width": 64, "image_size": 32, "text_layers": 1, "vision_layers": 1}
    plain = {"words": 12, "frames": 4}
    method = GAID(TinyClipEncoder(**encoder), audio_encoder=TinyWav2Vec2Encoder(), **plain)
    audio = {"class_path": "tvr_lightning.encoders.TinyWav2Vec2Encoder", "init_args": {}}
    checkpoint = save_checkpoint(method, encoder, {**plain, "audio_encoder": audio}, folder / "gaid.ckpt")
    report = index([folder / "videos"], folder / "index", [ScorerSource(str(checkpoint))], progress=False)
    assert report.added == 4, report.lines()
    with Searcher(folder / "index") as made:
        yield made


def test_scores_use_audio_where_there_is_some(searcher):
    scorer = searcher.scorers["gaid"]
    text = scorer.encode_texts(["a man plays the piano"])
    changes = {}
    for result in find(searcher, "a man plays the piano").results:
        video, _ = searcher.catalog.features(searcher.catalog.spans(result.id)[0].key, "gaid")
        silent = dataclasses.replace(video, audio=video.frames)  # audio equal to the frames changes nothing
        changes[result.path.rpartition("/")[2]] = result.score - float(scorer.score(text, silent))
    assert changes.pop("mute.mkv") == pytest.approx(0.0, abs=1e-6)
    assert sorted(changes) == ["high.mkv", "low.mkv", "middle.mkv"]
    assert all(abs(change) > 1e-6 for change in changes.values())
    assert len({round(change, 7) for change in changes.values()}) == 3
