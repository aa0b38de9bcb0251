"""Long videos are cut into shots or windows, found by their moments, and written atomically."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from search_parts import find, find_file, write_clip, write_frames

from tvr_lightning.media.video import read_clip
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index, read_ahead
from tvr_lightning.search.scorer import Scorer
from tvr_lightning.search.segments import RATE, Frame, Segments, cut, hue_saturation_brightness, read_segments

COLORS = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30), (30, 200, 200), (200, 30, 200)]
SECONDS = 4.0


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A video of six shots of four seconds each, with a white block that moves through each."""
    frames = np.repeat(np.array(COLORS, np.uint8), int(4 * SECONDS), axis=0)[:, None, None].repeat(64, 1).repeat(96, 2)
    for number, frame in enumerate(frames):
        left = 2 * (number % int(4 * SECONDS))
        frame[20:30, left : left + 10] = 255
    return write_frames(tmp_path_factory.mktemp("scenes") / "scenes.mp4", frames)


def bounds(colors, rule):
    """Start, end, and number of frames of each segment of a video with these colors at a constant rate."""
    frames = []
    for number, color in enumerate(colors):
        compared = hue_saturation_brightness(Image.new("RGB", (64, 64), COLORS[color]))
        frames.append((number / RATE, Frame(compared, {}, b"", (64, 64))))
    return [(start, end, len(inside)) for start, end, inside in cut(frames, rule)]


def test_windows_have_a_length_and_an_overlap():
    assert bounds([0] * 22, Segments("windows", 4.0)) == [(0, 4, 8), (4, 8, 8), (8, 11, 6)]
    assert bounds([0] * 22, Segments("windows", 4.0, 1.0)) == [(0, 4, 8), (3, 7, 8), (6, 10, 8), (9, 11, 4)]
    for sizes, message in (((1.0,), "segment_length is 1 s"), ((10.0, 9.5), "segment_overlap is 9.5 s")):
        with pytest.raises(SearchError, match=message):
            Segments("windows", *sizes)


def test_shots_end_at_a_change_of_colors_or_at_their_maximum_length():
    shots = bounds([0] * 6 + [1] * 12 + [2] * 30, Segments("shots", 10.0))
    assert shots == [(0, 3, 6), (3, 9, 12), (9, 19, 20), (19, 24, 10)]
    flicker = bounds([0, 1] * 8, Segments("shots", 10.0))
    assert all(end - start >= 2 for start, end, _ in flicker)


def test_a_window_is_read_as_a_clip_of_the_same_span(scenes, sources):
    """The sampled times are those of the file's frames, so both must contain the same frames."""
    scorer = Scorer(sources[0])
    segments = list(read_segments(scenes, {"gare": scorer}, Segments("windows", 4.0)))
    assert [(each.start, each.end) for each in segments] == [(4.0 * k, 4.0 * k + 4.0) for k in range(6)]
    assert segments[0].size == (96, 64)
    preparation = scorer.module.encoder.preparation
    for each in segments:
        span, clip = (each.start, each.end), each.clips["gare"]
        expected = read_clip(scenes, scorer.module.frames, preparation, sampling=scorer.sampling, span=span)
        assert torch.equal(clip.media.pixels[0], expected.pixels)
        assert torch.equal(clip.media.frame_mask[0], expected.frame_mask)
        assert clip.times.tolist() == pytest.approx(expected.timestamps.tolist())


@pytest.mark.parametrize(("kind", "count"), [("shots", 6), pytest.param("windows", 3, marks=pytest.mark.slow)])
def test_a_long_video_is_found_by_its_moments(scenes, sources, tmp_path, kind, count):
    videos, out = tmp_path / "videos", tmp_path / "index"
    write_clip(videos / "short.mp4", 1)
    (videos / "scenes.mp4").write_bytes(scenes.read_bytes())
    report = index([videos], out, sources, progress=False, batch_size=4, segments=Segments(kind, 10.0))
    assert report.total == 2
    with Searcher(out) as searcher:
        video, short = searcher.table.videos()
        assert (video.width, video.height) == (96, 64)
        spans = searcher.table.spans(video.id)
        assert (len(spans), len(searcher.table.spans(short.id))) == (count, 1)
        assert spans[0].start == 0
        assert spans[-1].end == pytest.approx(24.0)
        for number, color in enumerate(COLORS if kind == "shots" else ()):
            Image.new("RGB", (96, 64), color).save(tmp_path / "query.png")
            example = searcher.add_example(tmp_path / "query.png", "image")
            found = next(r for r in find(searcher, like=example).results if r.id == video.id)
            assert number * SECONDS <= found.start < (number + 1) * SECONDS
            assert found.best[0].time == found.start
        answer = find(searcher, "a red square", top=2)
        assert answer.candidates == count + 1
        assert len(answer.results) == 2, "one result per video"
        assert len(find(searcher, "a red square", top=2, candidates=2).results) == 2, "as many videos as requested"
        found = next(result for result in answer.results if result.id == video.id)
        for moment in found.moments:
            with Image.open(io.BytesIO(searcher.table.thumbnail(video.id, moment.time))) as shown:
                color = np.array(COLORS[int(moment.time // SECONDS)])
                assert np.abs(np.array(shown.getpixel((2, 60))) - color).max() < 20, "the thumbnail shows the moment"
        assert len(find(searcher, like=video.id).results) == 1
        itself = find_file(searcher, scenes).results[0]
        assert itself.id == video.id
        assert itself.score == pytest.approx(1.0, abs=1e-4), "a long example is cut like the videos of the index"
    assert index([], out, progress=False).kept == 2
    with pytest.raises(SearchError, match="into a new folder"):
        index([], out, progress=False, segments=Segments("windows", 12.0))


def test_an_interrupted_long_video_leaves_no_segments(scenes, sources, tmp_path, monkeypatch):
    out, calls, encode = tmp_path / "index", [], Scorer.encode_videos

    def interrupt(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(Scorer, "encode_videos", interrupt)
    options = {"progress": False, "batch_size": 1, "segments": Segments("windows", 4.0)}
    clip = write_clip(tmp_path / "first.mp4", 1)
    index([clip], out, sources[1:], **options)
    with pytest.raises(KeyboardInterrupt):
        index([clip, scenes], out, **options)
    with Searcher(out) as searcher:
        assert searcher.table.count() == len(searcher.table.keys()) == len(find(searcher, "a").results) == 1
    monkeypatch.undo()
    assert index([clip, scenes], out, **options).total == 2
    with Searcher(out) as searcher:
        assert len(searcher.table.keys()) == 7


def test_a_long_video_that_ends_early_is_skipped_and_named(scenes, sources, tmp_path):
    whole, broken = scenes.read_bytes(), tmp_path / "broken.mp4"
    start = whole.index(b"mdat")
    broken.write_bytes(whole[: start + 2000] + bytes(3000) + whole[start + 5000 :])
    clip, out = write_clip(tmp_path / "clip.mp4", 1), tmp_path / "index"
    report = index([clip, broken], out, sources[1:], progress=False, segments=Segments(length=5.0))
    assert report.total == 1
    assert "broken.mp4" in report.skipped[0]
    again = index([], out, progress=False)
    assert (again.added, again.kept) == (0, 1), "it is read again only after a change"


def test_no_more_than_one_item_is_read_ahead():
    taken = []
    ahead = read_ahead(taken.append(number) or number for number in range(20))
    assert next(ahead) == 0
    assert len(taken) <= 2
    assert list(ahead) == list(range(1, 20))
