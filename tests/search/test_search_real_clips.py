"""Sixty real clips (TVR_TEST_DATA) through the command line, from Python, over HTTP and on the page."""

import csv
import json

import pytest
from browser import serving, wait
from search_parts import find, find_file

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher

CLIPS = 60


@pytest.fixture(scope="module")
def folder(test_data):
    return test_data / "clips" / "videos"


@pytest.fixture(scope="module")
def captions(test_data):
    """File name and first caption of every clip."""
    with (test_data / "clips" / "captions.csv").open(encoding="utf-8", newline="") as file:
        return {row["file"].rpartition("/")[2]: row["caption1"] for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def real_index(folder, captions, checkpoints, tmp_path_factory):
    """An index of the clips in the default store, with their captions as the bank of queries."""
    pytest.importorskip("lancedb", reason="the extra `search` is not installed")
    out = tmp_path_factory.mktemp("real") / "index"
    bank = out.with_name("bank.txt")
    bank.write_text("\n".join(captions.values()), encoding="utf-8")
    ckpts = [word for path in checkpoints.values() for word in ("--ckpt_path", str(path))]
    assert main(["index", str(folder), "--out", str(out), "--bank", str(bank), *ckpts]) == 0
    return out


@pytest.fixture(scope="module")
def searcher(real_index):
    with Searcher(real_index) as made:
        yield made


def test_every_clip_is_indexed_with_its_moments(searcher, folder):
    rows = searcher.catalog.videos()
    assert {row.path.name for row in rows} == {path.name for path in folder.iterdir()}
    assert len(rows) == CLIPS
    assert searcher.catalog.skipped() == []
    spans = {row.id: searcher.catalog.spans(row.id) for row in rows}
    assert searcher.vectors.keys() == {span.key for found in spans.values() for span in found}
    assert all(len(spans[row.id]) == 1 for row in rows if row.duration <= 20)
    assert {path.suffix for path in folder.iterdir()} == {".mp4", ".avi", ".mkv", ".webm"}
    for row in rows:
        features, times = searcher.catalog.features(searcher.catalog.spans(row.id)[0].key, "gare")
        assert features.frame_mask.any()
        assert 0 <= float(times.max()) < row.duration
        assert searcher.catalog.thumbnail(row.id, 0.0)[:3] == b"\xff\xd8\xff"


def test_indexing_again_reads_nothing(real_index, folder, capsys):
    assert main(["index", str(folder), "--out", str(real_index)]) == 0
    assert f"0 videos added, {CLIPS} kept, 0 removed; {CLIPS} in the index" in capsys.readouterr().out


def test_the_command_line_and_python_find_the_same(real_index, searcher, captions, capsys):
    for query in list(captions.values())[:3]:
        options = ["--index", str(real_index), "--top", "5", "--normalize", "sinkhorn", "--json"]
        assert main(["search", query, *options]) == 0
        printed = json.loads(capsys.readouterr().out)
        expected = find(searcher, query, top=5, normalize="sinkhorn")
        assert [r["path"] for r in printed["results"]] == [r.path for r in expected.results]
        assert [r["score"] for r in printed["results"]] == pytest.approx([r.score for r in expected.results])
        assert printed["candidates"] == len(searcher.catalog.keys()) > CLIPS


def test_every_clip_resembles_itself_most(searcher, folder):
    for name in ("dog_barking.mp4", "flipping_a_pancake.mkv", "mmaction_test.avi", "moviepy_big_buck_bunny_0_30.webm"):
        found = find_file(searcher, folder / name, top=3).results
        assert found[0].path.endswith(f"/{name}")
        assert found[0].score == pytest.approx(1.0, abs=1e-4)


def test_the_api_and_the_page(real_index, folder, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    from tvr_lightning.search.server import ServerOptions, create_app

    with Searcher(real_index) as searcher, serving(create_app(searcher, ServerOptions())) as address:
        browser.get(address)
        wait(browser, lambda b: f"{CLIPS} videos" in b.find_element(By.ID, "state").text)
        browser.find_element(By.ID, "query").send_keys("a dog runs over grass", Keys.ENTER)
        items = wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#answers li"))
        shown = [item.find_element(By.TAG_NAME, "h3").text.partition(". ")[2] for item in items]
        expected = [r.path.rpartition("/")[2] for r in find(searcher, "a dog runs over grass", top=12).results]
        assert shown == expected
        size = "Math.max(i.naturalWidth, i.naturalHeight) == 320"
        loaded = f"return [...document.querySelectorAll('#answers img')].slice(0, 4).every(i => {size})"
        wait(browser, lambda b: b.execute_script(loaded))
        browser.find_element(By.ID, "query").clear()  # with words in the box, both would be asked
        browser.find_element(By.ID, "example").send_keys(str(folder / "dog_barking.mp4"))
        first = "return document.querySelector('#answers h3')?.textContent"
        wait(browser, lambda b: b.execute_script(first) == "1. dog_barking.mp4")
        item = browser.find_element(By.CSS_SELECTOR, "#answers li")
        best = find_file(searcher, folder / "dog_barking.mp4", top=1).results[0].best[0].time
        item.find_element(By.CLASS_NAME, "play").click()
        video = wait(browser, lambda b: b.find_element(By.CSS_SELECTOR, "#player video"))
        # It plays, from the best moment on: time goes by, and pictures of the clip's own size are decoded.
        wait(browser, lambda b: b.execute_script("return arguments[0].currentTime", video) > best)
        assert browser.execute_script("return arguments[0].error", video) is None
        assert browser.execute_script("return arguments[0].videoWidth", video) > 0
        said = browser.find_element(By.ID, "state").text
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"], said
