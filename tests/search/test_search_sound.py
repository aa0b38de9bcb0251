"""GAID's results contain the contribution of audio to the score."""

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


def test_the_share_is_the_score_less_what_the_picture_alone_gives(searcher):
    scorer = searcher.scorers["gaid"]
    text = scorer.encode_texts(["a man plays the piano"])
    results = find(searcher, "a man plays the piano").results
    assert len(results) == 4
    for result in results:
        video, _ = searcher.catalog.features(searcher.catalog.spans(result.id)[0].key, "gaid")
        picture = dataclasses.replace(video, audio=video.frames)
        without = float(scorer.score(text, picture).similarity[0, 0])
        assert result.sound == pytest.approx(result.score - without, abs=1e-5)


def test_sound_counts_where_there_is_some(searcher):
    shares = {r.path.rpartition("/")[2]: r.sound for r in find(searcher, "a man plays the piano").results}
    assert shares["mute.mkv"] == pytest.approx(0.0, abs=1e-6)
    heard = [shares[name] for name in ("low.mkv", "middle.mkv", "high.mkv")]
    assert all(abs(share) > 1e-6 for share in heard)
    assert len({round(share, 7) for share in heard}) == 3, "other sounds bring other shares"


def test_without_the_second_stage_nothing_is_said_of_sound(searcher):
    assert {r.sound for r in find(searcher, "a man", rerank="none").results} == {None}
