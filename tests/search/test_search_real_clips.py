"""Real clips (TVR_TEST_DATA) of every container on the command line and from Python."""

import csv
import shutil

import pytest
from search_parts import find_file

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher

CLIPS = 5


@pytest.fixture(scope="module")
def folder(test_data, tmp_path_factory):
    """A clip of every container (the WebM file is long enough to be cut), and one with a known best moment."""
    folder = tmp_path_factory.mktemp("clips")
    videos = test_data / "clips" / "videos"
    for suffix in (".mp4", ".avi", ".mkv", ".webm"):
        shutil.copy(min(videos.glob(f"*{suffix}"), key=lambda path: path.stat().st_size), folder)
    shutil.copy(videos / "dog_barking.mp4", folder)
    return folder


@pytest.fixture(scope="module")
def captions(test_data):
    """The first caption of every clip."""
    with (test_data / "clips" / "captions.csv").open(encoding="utf-8", newline="") as file:
        return [row["caption1"] for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def real_index(folder, captions, ckpt, tmp_path_factory):
    """An index of the clips in the default store, with their captions as the bank of queries."""
    out = tmp_path_factory.mktemp("real") / "index"
    bank = out.with_name("bank.txt")
    bank.write_text("\n".join(captions), encoding="utf-8")
    assert main(["index", str(folder), "--out", str(out), "--bank", str(bank), *ckpt]) == 0
    return out


@pytest.fixture(scope="module")
def searcher(real_index):
    with Searcher(real_index) as searcher:
        yield searcher


def test_every_real_clip_is_indexed_and_finds_itself(searcher, real_index, folder, capsys):
    rows = searcher.table.videos()
    assert {row.path.name for row in rows} == {path.name for path in folder.iterdir()}
    assert len(rows) == CLIPS
    assert searcher.table.skipped() == []
    spans = {row.id: searcher.table.spans(row.id) for row in rows}
    assert set(searcher.table.keys()) == {span.key for found in spans.values() for span in found}
    assert all(len(spans[row.id]) == 1 for row in rows if row.duration <= 20)
    for row in rows:
        features, times = searcher.table.features([spans[row.id][0].key], "clip4clip")[spans[row.id][0].key]
        assert features.frame_mask.any()
        assert 0 <= float(times.max()) < row.duration
        assert searcher.table.thumbnail(row.id, 0.0)[:3] == b"\xff\xd8\xff"
        best = find_file(searcher, row.path, top=3).results[0]
        assert best.path == str(row.path)
        assert best.score == pytest.approx(1.0, abs=1e-4)
    assert main(["index", str(folder), "--out", str(real_index)]) == 0
    assert f"0 videos added, {CLIPS} kept, 0 removed; {CLIPS} in the index" in capsys.readouterr().out
