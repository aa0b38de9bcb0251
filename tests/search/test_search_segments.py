"""Long videos are cut into shots or windows, found by their moments, and written atomically."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from search_parts import find, find_file, write_clip, write_frames

from tvr_lightning.media.container import VideoError
from tvr_lightning.media.video import frames_at_rate, read_clip
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index, read_ahead
from tvr_lightning.search.scorer import Scorer
from tvr_lightning.search.segments import RATE, Frame, Segments, cut, hue_saturation_brightness, read_segments

COLORS = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30), (30, 200, 200), (200, 30, 200)]
SECONDS = 6.0


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """A video of six shots of six seconds each, with a different number moving through each."""
    pictures = (
        np.repeat(np.array(COLORS, np.uint8), int(4 * SECONDS), axis=0)[:, None, None].repeat(64, 1).repeat(96, 2)
    )
    for frame, picture in enumerate(pictures):
        place = 2 * (frame % int(4 * SECONDS))
        picture[20:30, place : place + 10] = 255
    return write_frames(tmp_path_factory.mktemp("scenes") / "scenes.mp4", pictures)


def seen(*colors):
    """Frames at a constant rate, one color each."""
    for number, color in enumerate(colors):
        compared = hue_saturation_brightness(Image.new("RGB", (64, 64), COLORS[color]))
        yield number / RATE, Frame(compared, {}, b"", (64, 64))


def bounds(segments):
    return [(start, end, len(frames)) for start, end, frames in segments]


def test_windows_have_a_length_and_an_overlap():
    frames = list(seen(*[0] * 22))
    assert bounds(cut(frames, Segments("windows", 4.0))) == [(0, 4, 8), (4, 8, 8), (8, 11, 6)]
    overlapping = bounds(cut(frames, Segments("windows", 4.0, 1.0)))
    assert overlapping == [(0, 4, 8), (3, 7, 8), (6, 10, 8), (9, 11, 4)]
    for options, said in (
        (("windows", 1.0), "segment_length is 1 s"),
        (("windows", 10.0, 9.5), "segment_overlap is 9.5 s"),
        (("none", 10.0), "does not cut videos"),
    ):
        with pytest.raises(SearchError, match=said):
            Segments(*options)


def test_shots_end_where_the_picture_changes_and_at_their_length():
    frames = list(seen(*[0] * 6, *[1] * 12, *[2] * 30))
    assert bounds(cut(frames, Segments("shots", 10.0))) == [(0, 3, 6), (3, 9, 12), (9, 19, 20), (19, 24, 10)]
    flicker = list(seen(*[0, 1] * 8))
    assert all(end - start >= 2 for start, end, _ in bounds(cut(flicker, Segments("shots", 10.0))))


def test_frames_at_a_rate_show_what_is_on_screen(scenes, tmp_path):
    frames = frames_at_rate(scenes, 2.0, lambda picture: picture.getpixel((2, 60)))
    found = list(frames)
    assert [time for time, _ in found] == [number / 2 for number in range(72)]
    for time, color in found:
        assert np.abs(np.array(color) - COLORS[int(time // SECONDS)]).max() < 12
    (tmp_path / "a.mp4").write_text("none")
    with pytest.raises(VideoError):
        list(frames_at_rate(tmp_path / "a.mp4", 2.0, lambda picture: None))


def test_a_window_is_read_as_the_method_reads_such_a_clip(scenes, sources):
    """If the sampled times are those of the file's frames, a segment contains the frames of a clip of its span."""
    model = Scorer(sources[0])
    segments = list(read_segments(scenes, {"gare": model}, Segments("windows", 6.0)))
    assert [(each.start, each.end) for each in segments] == [(6.0 * k, 6.0 * k + 6.0) for k in range(6)]
    assert segments[0].size == (96, 64)
    for each in segments:
        expected = read_clip(
            scenes,
            model.module.frames,
            model.module.encoder.preparation,
            sampling=model.sampling,
            span=(each.start, each.end),
        )
        clip = each.clips["gare"]
        assert torch.equal(clip.media.pixels[0], expected.pixels)
        assert torch.equal(clip.media.frame_mask[0], expected.frame_mask)
        assert clip.times.tolist() == pytest.approx(expected.timestamps.tolist())


@pytest.mark.parametrize("kind", ["shots", "windows"])
def test_a_long_video_is_found_by_its_moments(scenes, gallery, sources, tmp_path, kind):
    videos, out = tmp_path / "videos", tmp_path / "index"
    videos.mkdir()
    (videos / "scenes.mp4").write_bytes(scenes.read_bytes())
    (videos / "short.mp4").write_bytes((gallery / "clip1.mp4").read_bytes())
    report = index([videos], out, sources, progress=False, batch_size=4, segments=Segments(kind, 10.0))
    assert report.total == 2
    with Searcher(out) as searcher:
        rows = {row.path.name: row for row in searcher.catalog.videos()}
        assert (rows["scenes.mp4"].width, rows["scenes.mp4"].height) == (96, 64)
        spans = searcher.catalog.spans(rows["scenes.mp4"].id)
        assert len(searcher.catalog.spans(rows["short.mp4"].id)) == 1
        expected = 6 if kind == "shots" else 4
        assert len(spans) == expected
        assert spans[0].start == 0
        assert spans[-1].end == pytest.approx(36.0)
        for number, color in enumerate(COLORS if kind == "shots" else ()):
            picture = tmp_path / "query.png"
            Image.new("RGB", (96, 64), color).save(picture)
            example = searcher.add_example(picture, "image")
            found = next(r for r in find(searcher, like=example).results if r.id == rows["scenes.mp4"].id)
            assert number * SECONDS <= found.start < (number + 1) * SECONDS
            assert found.best[0].time == found.start
        answer = find(searcher, "a red square", top=2)
        assert len(answer.results) == 2, "one result per video"
        assert answer.candidates == expected + 1
        assert len(find(searcher, "a red square", top=2, candidates=2).results) == 2, "as many videos as were asked for"
        found = next(result for result in answer.results if result.id == rows["scenes.mp4"].id)
        for moment in found.moments:
            with Image.open(io.BytesIO(searcher.catalog.thumbnail(found.id, moment.time))) as shown:
                color = np.array(COLORS[int(moment.time // SECONDS)])
                assert np.abs(np.array(shown.getpixel((2, 60))) - color).max() < 20, "the moment itself is shown"
        assert len(find(searcher, like=found.id).results) == 1
        itself = find_file(searcher, scenes).results[0]
        assert itself.id == found.id
        assert itself.score == pytest.approx(1.0, abs=1e-4), "a long example is cut as the index's videos are"
    assert index([], out, progress=False).kept == 2
    with pytest.raises(SearchError, match="into a new folder"):
        index([], out, progress=False, segments=Segments("windows", 12.0))


def test_a_long_video_is_written_as_a_whole_or_not_at_all(scenes, sources, tmp_path, monkeypatch):
    out = tmp_path / "index"
    insert, calls = Catalog.add_span, []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        insert(*arguments)

    monkeypatch.setattr(Catalog, "add_span", dies)
    options = {"progress": False, "batch_size": 1, "segments": Segments("windows", 6.0)}
    clip = write_clip(tmp_path / "first.mp4", 1)
    index([clip], out, sources[1:], **options)
    with pytest.raises(KeyboardInterrupt):
        index([clip, scenes], out, (), None, **options)
    assert len(calls) == 3
    with Searcher(out) as searcher:
        assert searcher.catalog.count() == 1
        assert len(searcher.catalog.keys()) == 1
        assert len(find(searcher, "a").results) == 1
    monkeypatch.undo()
    assert index([clip, scenes], out, **options).total == 2
    with Searcher(out) as searcher:
        assert len(searcher.catalog.keys()) == 7


def test_a_long_video_that_breaks_off_is_named(scenes, sources, tmp_path):
    whole = scenes.read_bytes()
    broken = tmp_path / "broken.mp4"
    place = whole.index(b"mdat")
    broken.write_bytes(whole[: place + 2000] + bytes(3000) + whole[place + 5000 :])
    clip = write_clip(tmp_path / "clip.mp4", 1)
    out, how = tmp_path / "index", Segments(length=5.0)
    report = index([clip, broken], out, sources[1:], progress=False, segments=how)
    assert report.total == 1
    assert "broken.mp4" in report.skipped[0]
    again = index([], out, progress=False)
    assert (again.added, again.kept) == (0, 1), "read again once it changes"


def test_no_more_than_one_item_is_read_ahead():
    taken = []

    def items():
        for number in range(20):
            taken.append(number)
            yield number

    ahead = read_ahead(items())
    assert next(ahead) == 0
    assert len(taken) <= 2
    assert list(ahead) == list(range(1, 20))
