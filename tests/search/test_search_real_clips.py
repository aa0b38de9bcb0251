"""Real clips (TVR_TEST_DATA) of every container on the command line, from Python, and on the page."""

import csv
import json
import shutil

import pytest
from browser import wait
from search_parts import find, find_file, served

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher

CLIPS = 15


@pytest.fixture(scope="module")
def folder(test_data, tmp_path_factory):
    """The smallest clips, one with a known best moment, and one that is long enough to be cut."""
    folder = tmp_path_factory.mktemp("clips")
    smallest = sorted((test_data / "clips" / "videos").iterdir(), key=lambda path: path.stat().st_size)[: CLIPS - 2]
    named = ("dog_barking.mp4", "moviepy_big_buck_bunny_0_30.webm")
    for path in (*smallest, *(test_data / "clips" / "videos" / name for name in named)):
        shutil.copy(path, folder)
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
    rows = searcher.catalog.videos()
    assert {row.path.name for row in rows} == {path.name for path in folder.iterdir()}
    assert len(rows) == CLIPS
    assert searcher.catalog.skipped() == []
    spans = {row.id: searcher.catalog.spans(row.id) for row in rows}
    assert searcher.vectors.keys() == {span.key for found in spans.values() for span in found}
    assert all(len(spans[row.id]) == 1 for row in rows if row.duration <= 20)
    assert {path.suffix for path in folder.iterdir()} == {".mp4", ".avi", ".mkv", ".webm"}
    for row in rows:
        features, times = searcher.catalog.features(spans[row.id][0].key, "clip4clip")
        assert features.frame_mask.any()
        assert 0 <= float(times.max()) < row.duration
        assert searcher.catalog.thumbnail(row.id, 0.0)[:3] == b"\xff\xd8\xff"
    for name in ("dog_barking.mp4", "flipping_a_pancake.mkv", "mmaction_test.avi"):
        best = find_file(searcher, folder / name, top=3).results[0]
        assert best.path.endswith(f"/{name}")
        assert best.score == pytest.approx(1.0, abs=1e-4)
    assert main(["index", str(folder), "--out", str(real_index)]) == 0
    assert f"0 videos added, {CLIPS} kept, 0 removed; {CLIPS} in the index" in capsys.readouterr().out


def test_the_command_line_and_python_find_the_same(real_index, searcher, captions, capsys):
    options = ["--index", str(real_index), "--top", "5", "--normalize", "sinkhorn", "--json"]
    assert main(["search", captions[0], *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = find(searcher, captions[0], top=5, normalize="sinkhorn")
    assert [r["path"] for r in printed["results"]] == [r.path for r in expected.results]
    assert [r["score"] for r in printed["results"]] == pytest.approx([r.score for r in expected.results])
    assert printed["candidates"] == len(searcher.catalog.keys()) > CLIPS


@pytest.mark.slow
def test_the_page_plays_a_real_clip_from_its_best_moment(searcher, folder, browser):
    expected = find_file(searcher, folder / "dog_barking.mp4", top=12).results
    with served(searcher) as address:
        browser.get(address)
        wait(browser, lambda b: f"{CLIPS} videos" in b.find_element("id", "state").text)
        browser.find_element("id", "example").send_keys(str(folder / "dog_barking.mp4"))
        names = "return [...document.querySelectorAll('#answers h3')].map(e => e.textContent.split('. ')[1])"
        wait(browser, lambda b: b.execute_script(names) == [r.path.rpartition("/")[2] for r in expected])
        loaded = "return [...document.querySelectorAll('#answers img')].slice(0, 4).every(i => i.naturalWidth > 99)"
        wait(browser, lambda b: b.execute_script(loaded))
        browser.find_element("css selector", "#answers li .play").click()
        video = wait(browser, lambda b: b.find_element("css selector", "#player video"))
        best = expected[0].best[0].time
        wait(browser, lambda b: b.execute_script("return arguments[0].currentTime", video) > best)
        assert browser.execute_script("return [arguments[0].error, arguments[0].videoWidth > 0]", video) == [None, True]
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
