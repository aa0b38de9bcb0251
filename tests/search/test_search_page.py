"""The page in a real browser: start, results, player, images, a shared link, the keyboard, axe."""

import shutil

import pytest

pytest.importorskip("selenium", reason="selenium drives the browser")
from browser import find, needs_axe, violations, wait
from search_parts import served
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tvr_lightning.data.recover_captions import Description, write_captions
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.results import clock

CARDS, LIBRARY = "#answers li", "#library li"
# Read in one go: the list may be replaced between two questions to the browser.
FIRST = "return document.querySelector('#answers h3')?.textContent"
CHIP = "return document.querySelector('#chip:not([hidden]) span')?.textContent"
VIDEO = "return document.querySelector('#player[open] video')"


@pytest.fixture(scope="module")
def address(indexed, tmp_path_factory):
    """The page of the index, with captions of one video."""
    folder = tmp_path_factory.mktemp("captioned")
    write_captions(folder / "said.parquet", [Description("clip6", n, n, n + 1, text) for n, text in enumerate("ab")])
    index([], shutil.copytree(indexed, folder / "index"), progress=False, captions=folder / "said.parquet")
    with Searcher(folder / "index") as searcher, served(searcher) as address:
        yield address


def cards(browser, css, count):
    """Wait until there are that many cards of the library or of the answers."""
    return wait(browser, lambda b: len(found := b.find_elements(By.CSS_SELECTOR, css)) == count and found)


def shows(browser, script, value=None):
    """Wait until a script returns the value, or anything if none is given."""
    return wait(browser, lambda b: (found := b.execute_script(script)) and value in (None, found) and found)


def start(browser, address, query=""):
    browser.get(address + query)
    wait(browser, lambda b: "8 videos" in find(b, "#state").text)


def ask(browser, address):
    start(browser, address)
    cards(browser, LIBRARY, 8)
    find(browser, "#query").send_keys("a red square", Keys.ENTER)
    return cards(browser, CARDS, 8)


def play(browser, item):
    item.find_element(By.CLASS_NAME, "play").click()
    return shows(browser, VIDEO)


def press(browser, *keys):
    webdriver.ActionChains(browser).send_keys(*keys).perform()


def test_the_library_its_folders_and_the_results_are_shown(browser, address):
    start(browser, address)
    pictures = [card.find_element(By.TAG_NAME, "img") for card in cards(browser, LIBRARY, 8)]
    assert find(browser, "#begin").text == "Library: 8 videos"
    size = "return [arguments[0].naturalWidth, arguments[0].naturalHeight]"
    wait(browser, lambda b: b.execute_script(size, pictures[0]) == [64, 64])
    find(browser, "#query").send_keys("a red square", Keys.ENTER)
    items = cards(browser, CARDS, 8)
    assert not find(browser, "#library").is_displayed()
    facts = {item.find_element(By.CLASS_NAME, "facts").text.partition(" · ")[0] for item in items}
    assert facts <= {"good match", "weak match"}
    assert find(browser, "#answers h2").text in ("Best matches", "Nothing here matches well")
    captions = "return [...document.querySelectorAll('#answers .said')].map(each => each.textContent)"
    assert "a · b" in browser.execute_script(captions)
    find(browser, "#home").click()
    wait(browser, lambda b: find(b, "#library").is_displayed())
    folder = find(browser, "#folder")
    names = [option.text for option in folder.find_elements(By.TAG_NAME, "option")]
    assert names == ["all", "(top) (6)", "below (2)"]
    folder.find_element(By.CSS_SELECTOR, "option[value=below]").click()
    cards(browser, LIBRARY, 2)
    find(browser, "#query").send_keys("a red square", Keys.ENTER)
    found = "return [...document.querySelectorAll('#answers h3')].map(e => e.textContent.split(' ')[1]).sort()"
    shows(browser, found, ["below/clip6.mp4", "below/clip7.mp4"])
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.slow
def test_the_player_starts_at_the_best_moment_with_audio_and_steps_through_results(browser, address):
    items = ask(browser, address)
    bars = items[0].find_elements(By.CSS_SELECTOR, ".strip i")
    assert len(bars) >= 3
    assert ": similarity " in bars[0].get_attribute("title")
    end = items[0].find_element(By.CLASS_NAME, "time").text.partition(" of ")[2]
    axis = items[0].find_element(By.CLASS_NAME, "axis").text
    assert [part.strip() for part in axis.split("similarity")] == ["0:00.0", end]
    video = play(browser, items[0])
    assert browser.execute_script(
        "return [[9, 10], [59, 60], [30, 60]].map(([start, duration]) => begin({start, duration}))"
    ) == [0, 50, 28]
    reached = browser.execute_script("return begin(state.results[0])") - 0.06
    wait(browser, lambda b: b.execute_script("return arguments[0].currentTime", video) >= reached)
    assert browser.execute_script("return [arguments[0].error, arguments[0].muted]", video) == [None, False]
    assert browser.execute_script("return arguments[0].getBoundingClientRect().width", video) > 500
    name = find(browser, "#playing")
    shown = [item.find_element(By.TAG_NAME, "h3").get_attribute("textContent").partition(". ")[2] for item in items]
    assert name.text == shown[0]
    assert not find(browser, "#previous").is_enabled()
    press(browser, "n")
    wait(browser, lambda b: name.text == shown[1])
    find(browser, "#next").click()
    wait(browser, lambda b: name.text == shown[2])
    press(browser, "p")
    wait(browser, lambda b: name.text == shown[1])
    press(browser, *"nnnnnn")
    wait(browser, lambda b: name.text == shown[7])
    assert not find(browser, "#next").is_enabled()
    press(browser, *"pppppp")
    wait(browser, lambda b: name.text == shown[1])
    strip = find(browser, "#strip")
    strip.send_keys(Keys.END)
    last = browser.execute_script("return player.list[player.place].moments.at(-1).time")
    wait(browser, lambda b: b.execute_script("return player.video.currentTime") >= last - 0.1)
    assert ":" in strip.get_attribute("aria-valuetext")
    find(browser, "#copy-path").click()
    wait(browser, lambda b: find(b, "#copied").text in ("Copied the path.", shown[1]))
    press(browser, Keys.ESCAPE)
    wait(browser, lambda b: b.execute_script(VIDEO) is None)
    assert browser.execute_script("return arguments[0].contains(document.activeElement)", items[0])
    items[0].find_element(By.CLASS_NAME, "similar").click()
    shows(browser, CHIP, f"like {shown[0]}")
    wait(browser, lambda b: (first := b.execute_script(FIRST)) and first != f"1. {shown[0]}")
    assert find(browser, "#query").get_attribute("value") == ""


@pytest.mark.slow
def test_bad_input_is_announced(browser, address, tmp_path):
    start(browser, address)
    assert find(browser, "#status").get_attribute("aria-live") == "polite"
    (tmp_path / "none.png").write_text("no image")
    find(browser, "#example").send_keys(str(tmp_path / "none.png"))
    wait(browser, lambda b: "the image" in find(b, "#status").text)
    start(browser, address, "?like=0123456789abcdef&name=forgotten.png")
    wait(browser, lambda b: "no video" in find(b, "#status").text)
    for parameter, problem in {"q=red": "the unknown parameter q. ", "rerank=best": "rerank is best, which"}.items():
        start(browser, address, f"?{parameter}")
        wait(browser, lambda b, problem=problem: problem in find(b, "#status").text)
        assert not find(browser, "#library").is_displayed()
    times = [0.04, 9.96, 59.96, 63.3, 3599.96, 3723.4, 36000.0]
    assert browser.execute_script("return arguments[0].map(clock)", times) == [clock(each) for each in times]


@pytest.mark.slow
@needs_axe
def test_axe_finds_no_serious_violation(browser, address):
    start(browser, address)
    cards(browser, LIBRARY, 8)
    assert violations(browser) == []
    items = ask(browser, address)
    assert violations(browser) == []
    play(browser, items[0])
    assert violations(browser) == []
