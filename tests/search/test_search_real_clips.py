"""Real clips (TVR_TEST_DATA) of every container on the command line and from Python."""

import csv
import shutil

import pytest
from search_parts import find_file

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher


def test_every_real_clip_is_indexed_and_finds_itself(test_data, tmp_path, ckpt, capsys):
    """A clip of every container (the WebM file is long enough to be cut), and their captions as the bank of queries."""
    clips, folder, out, bank = test_data / "clips", tmp_path / "clips", tmp_path / "index", tmp_path / "bank.txt"
    folder.mkdir()
    for suffix in (".mp4", ".avi", ".mkv", ".webm"):
        shutil.copy(min((clips / "videos").glob(f"*{suffix}"), key=lambda path: path.stat().st_size), folder)
    with (clips / "captions.csv").open(encoding="utf-8", newline="") as file:
        bank.write_text("\n".join(row["caption1"] for row in csv.DictReader(file)), encoding="utf-8")
    assert main(["index", str(folder), "--out", str(out), "--bank", str(bank), *ckpt]) == 0
    with Searcher(out) as searcher:
        rows = searcher.table.videos()
        assert {row.path.name for row in rows} == {path.name for path in folder.iterdir()}
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
    capsys.readouterr()
    assert main(["index", str(folder), "--out", str(out)]) == 0
    assert "0 videos added, 4 kept, 0 removed; 4 in the index" in capsys.readouterr().out
