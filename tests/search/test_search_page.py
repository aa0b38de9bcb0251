"""The page in a real browser: start, results, player, images, a shared link, keyboard, a phone, axe."""

import os
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium drives the browser")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
from browser import serving, wait
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.results import clock
from tvr_lightning.search.server import ServerOptions, create_app

AXE = Path(os.environ.get("TVR_AXE", ""))
# Read in one go: the list may be replaced between two questions to the browser.
FIRST = "return document.querySelector('#answers h3')?.textContent"
CHIP = "return document.querySelector('#chip:not([hidden]) span')?.textContent"
VIDEO = "return document.querySelector('#player[open] video')"


@pytest.fixture(scope="module")
def address(indexed):
    with Searcher(indexed) as searcher, serving(create_app(searcher, ServerOptions())) as made:
        yield made


def start(browser, address, query=""):
    browser.get(address + query)
    wait(browser, lambda b: "8 videos" in b.find_element(By.ID, "state").text)


def ask(browser, address, query="a red square"):
    start(browser, address)
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "#library li")) == 8)
    browser.find_element(By.ID, "query").send_keys(query, Keys.ENTER)
    return wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#answers li"))


def play(browser, item):
    item.find_element(By.CLASS_NAME, "play").click()
    return wait(browser, lambda b: b.execute_script(VIDEO))


def press(browser, *keys):
    webdriver.ActionChains(browser).send_keys(*keys).perform()


def errors(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_start_shows_the_library(browser, address):
    start(browser, address)
    cards = wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#library li"))
    assert len(cards) == 8
    assert browser.find_element(By.ID, "begin").text == "Library: 8 videos"
    size = "return [arguments[0].naturalWidth, arguments[0].naturalHeight]"
    picture = cards[0].find_element(By.TAG_NAME, "img")
    wait(browser, lambda b: b.execute_script(size, picture) == [64, 64])
    browser.find_element(By.ID, "query").send_keys("a red square", Keys.ENTER)
    wait(browser, lambda b: b.execute_script(FIRST))
    assert not browser.find_element(By.ID, "library").is_displayed()
    browser.find_element(By.ID, "home").click()
    wait(browser, lambda b: b.find_element(By.ID, "library").is_displayed())
    assert not errors(browser)


def test_folders_choose_in_the_library_and_among_results(browser, address):
    start(browser, address)
    folder = browser.find_element(By.ID, "folder")
    names = [option.text for option in folder.find_elements(By.TAG_NAME, "option")]
    assert names == ["all", "(top) (6)", "below (2)"]
    folder.find_element(By.CSS_SELECTOR, "option[value=below]").click()
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "#library li")) == 2)
    browser.find_element(By.ID, "query").send_keys("a red square", Keys.ENTER)
    found = "return [...document.querySelectorAll('#answers h3')].map(e => e.textContent.split(' ')[1]).sort()"
    wait(browser, lambda b: b.execute_script(found) == ["below/clip6.mp4", "below/clip7.mp4"])


def test_results_say_how_well_they_match(browser, address):
    items = ask(browser, address)
    assert len(items) == 8
    facts = {item.find_element(By.CLASS_NAME, "facts").text.partition(" · ")[0] for item in items}
    assert facts <= {"good match", "weak match"}
    assert browser.find_element(By.CSS_SELECTOR, "#answers h2").text in ("Best matches", "Nothing here matches well")
    text = browser.find_element(By.TAG_NAME, "body").text
    assert "candidate" not in text
    assert "By gare" not in text


def test_the_player_plays_with_sound_from_the_best_moment_and_leads_on(browser, address):
    items = ask(browser, address)
    bars = items[0].find_elements(By.CSS_SELECTOR, ".strip i")
    assert len(bars) >= 3
    assert ": similarity " in bars[0].get_attribute("title")
    axis, duration = items[0].find_element(By.CLASS_NAME, "axis").text.split("similarity")
    shown_time = items[0].find_element(By.CLASS_NAME, "time").text
    assert (axis.strip(), duration.strip()) == ("0:00.0", shown_time.partition(" of ")[2])
    minutes, seconds = items[0].find_element(By.CLASS_NAME, "time").text.partition(" of ")[0].split(":")
    video = play(browser, items[0])
    reached = 60 * int(minutes) + float(seconds) - 0.06
    wait(browser, lambda b: b.execute_script("return arguments[0].currentTime", video) >= reached)
    assert browser.execute_script("return [arguments[0].error, arguments[0].muted]", video) == [None, False]
    assert browser.execute_script("return arguments[0].getBoundingClientRect().width", video) > 500
    name = browser.find_element(By.ID, "playing")
    shown = [item.find_element(By.TAG_NAME, "h3").get_attribute("textContent").partition(". ")[2] for item in items]
    assert name.text == shown[0]
    assert not browser.find_element(By.ID, "previous").is_enabled()
    press(browser, "n")
    wait(browser, lambda b: name.text == shown[1])
    browser.find_element(By.ID, "next").click()
    wait(browser, lambda b: name.text == shown[2])
    press(browser, "p")
    wait(browser, lambda b: name.text == shown[1])
    strip = browser.find_element(By.ID, "strip")
    strip.send_keys(Keys.END)
    last = browser.execute_script("return player.list[player.place].moments.at(-1).time")
    wait(browser, lambda b: b.execute_script("return player.video.currentTime") >= last - 0.1)
    assert ":" in strip.get_attribute("aria-valuetext")
    browser.find_element(By.ID, "copy-path").click()
    wait(browser, lambda b: b.find_element(By.ID, "copied").text in ("Copied the path.", shown[1]))
    press(browser, Keys.ESCAPE)
    wait(browser, lambda b: b.execute_script(VIDEO) is None)
    assert browser.execute_script("return arguments[0].contains(document.activeElement)", items[0])
    assert not errors(browser)


def test_a_shared_link_shows_the_same_after_a_reload(browser, address):
    items = ask(browser, address)
    browser.find_element(By.CSS_SELECTOR, "#folder option[value=below]").click()
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "#answers li")) == 2)
    browser.find_element(By.CSS_SELECTOR, "#folder option[value='.']").click()
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "#answers li")) == 8)
    browser.find_element(By.TAG_NAME, "summary").click()
    browser.find_element(By.ID, "top").clear()
    browser.find_element(By.ID, "top").send_keys("3", Keys.TAB)
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "#answers li")) == 3)
    items = browser.find_elements(By.CSS_SELECTOR, "#answers li")
    names = [item.find_element(By.TAG_NAME, "h3").text for item in items]
    play(browser, items[1])
    link = browser.current_url
    assert "q=a+red+square" in link
    assert "folder=." in link
    browser.get("about:blank")
    browser.get(link)
    wait(browser, lambda b: b.execute_script(VIDEO))
    assert browser.find_element(By.ID, "playing").text == names[1].partition(". ")[2]
    press(browser, Keys.ESCAPE)
    values = "return ['query', 'folder', 'top'].map(id => document.getElementById(id).value)"
    assert browser.execute_script(values) == ["a red square", ".", "3"]
    found = browser.find_elements(By.CSS_SELECTOR, "#answers h3")
    assert [each.text for each in found] == names
    browser.find_element(By.ID, "home").click()
    wait(browser, lambda b: b.find_element(By.ID, "library").is_displayed())
    browser.back()
    wait(browser, lambda b: b.execute_script(FIRST) == names[0])


def test_an_image_or_a_clip_is_an_example_alone_and_with_text(browser, address, gallery, tmp_path):
    picture = tmp_path / "picture.png"
    Image.new("RGB", (60, 40), "red").save(picture)
    start(browser, address)
    browser.find_element(By.ID, "example").send_keys(str(picture))
    wait(browser, lambda b: b.execute_script(CHIP) == "like picture.png")
    wait(browser, lambda b: b.execute_script(FIRST))
    browser.find_element(By.ID, "example").send_keys(str(gallery / "clip4.mp4"))
    wait(browser, lambda b: b.execute_script(FIRST) == "1. clip4.mp4")
    assert browser.execute_script(CHIP) == "like clip4.mp4"
    browser.find_element(By.ID, "query").send_keys("a red square", Keys.ENTER)
    wait(browser, lambda b: "q=a+red+square" in b.current_url)
    link = browser.current_url
    browser.get("about:blank")
    browser.get(link)
    wait(browser, lambda b: b.execute_script(CHIP) == "like clip4.mp4")
    browser.find_element(By.ID, "query").clear()
    button = browser.find_element(By.ID, "forget")
    assert button.get_attribute("aria-label") == "Forget clip4.mp4"
    button.click()
    assert browser.execute_script(CHIP) is None
    wait(browser, lambda b: b.find_element(By.ID, "library").is_displayed())
    assert browser.switch_to.active_element.get_attribute("id") == "query"


PASTE = """
const data = new DataTransfer();
const bytes = Uint8Array.from(atob(arguments[1]), c => c.charCodeAt(0));
data.items.add(new File([bytes], 'pasted.png', {type: 'image/png'}));
const kind = arguments[0];
const made = kind === 'paste' ? new ClipboardEvent('paste', {clipboardData: data, bubbles: true})
                              : new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true});
document.body.dispatchEvent(made);
"""


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_a_picture_can_be_pasted_and_dropped(browser, address, way, tmp_path):
    import base64

    picture = tmp_path / "picture.png"
    Image.new("RGB", (60, 40), "blue").save(picture)
    start(browser, address)
    browser.execute_script(PASTE, way, base64.b64encode(picture.read_bytes()).decode())
    wait(browser, lambda b: b.execute_script(CHIP) == "like pasted.png")
    wait(browser, lambda b: b.execute_script(FIRST))


def test_more_like_a_result(browser, address):
    items = ask(browser, address)
    name = browser.execute_script(FIRST).partition(" ")[2]
    items[0].find_element(By.CLASS_NAME, "similar").click()
    wait(browser, lambda b: b.execute_script(CHIP) == f"like {name}")
    wait(browser, lambda b: b.execute_script(FIRST) and b.execute_script(FIRST).partition(" ")[2] != name)
    assert browser.find_element(By.ID, "query").get_attribute("value") == ""
    other = browser.execute_script(FIRST).partition(" ")[2]
    play(browser, browser.find_element(By.CSS_SELECTOR, "#answers li"))
    browser.find_element(By.ID, "similar").click()
    wait(browser, lambda b: b.execute_script(CHIP) == f"like {other}")
    wait(browser, lambda b: b.execute_script(VIDEO) is None)


def test_bad_input_is_said_aloud(browser, address, tmp_path):
    fake = tmp_path / "fake.mp4"
    fake.write_text("no video")
    none = tmp_path / "none.png"
    none.write_text("no picture")
    start(browser, address)
    status = browser.find_element(By.ID, "status")
    browser.find_element(By.ID, "example").send_keys(str(fake))
    wait(browser, lambda b: "the clip" in status.text)
    browser.find_element(By.ID, "example").send_keys(str(none))
    wait(browser, lambda b: "the image" in status.text)
    assert status.get_attribute("aria-live") == "polite"
    start(browser, address, "?like=0123456789abcdef~forgotten.png")
    wait(browser, lambda b: "no video" in b.find_element(By.ID, "status").text)


def test_the_clock_of_the_page_is_that_of_the_command_line(browser, address):
    browser.get(address)
    times = [0.04, 9.96, 59.96, 63.3, 3599.96, 3723.4, 36000.0]
    assert browser.execute_script("return arguments[0].map(clock)", times) == [clock(each) for each in times]


def test_keys_alone_suffice(browser, address):
    items = ask(browser, address)
    rows = [item.rect["y"] for item in items]
    columns = rows.count(rows[0])
    assert 1 < columns < 8
    place = "return [...document.querySelectorAll('#answers li')].findIndex(li => li.contains(document.activeElement))"

    def go(key):
        press(browser, key)
        found = browser.execute_script(place)
        return found if found >= 0 else browser.switch_to.active_element.get_attribute("id")

    assert go(Keys.ARROW_LEFT) == "query", "in the text, left and right move in the text"
    assert go(Keys.ARROW_DOWN) == 0
    assert go(Keys.ARROW_RIGHT) == 1
    assert go(Keys.ARROW_DOWN) == 1 + columns
    assert go(Keys.ARROW_UP) == 1
    outline = "return getComputedStyle(arguments[0].querySelector('article')).outlineStyle"
    assert browser.execute_script(outline, items[1]) == "solid", "the focused element is visible"
    press(browser, Keys.ENTER)
    wait(browser, lambda b: b.execute_script(VIDEO))
    press(browser, Keys.ESCAPE)
    gone = "return !document.querySelector('#player video')"  # when the page has set the focus
    wait(browser, lambda b: b.execute_script(gone))
    assert browser.execute_script(place) == 1
    press(browser, "/")
    assert browser.switch_to.active_element.get_attribute("id") == "query"


def test_a_phone_in_the_dark(browser, address):
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        items = ask(browser, address)
        browser.execute_script("state.example = {id: 'a', name: 'of a very long name'.repeat(9)}; drawChip()")
        width = "return document.documentElement.scrollWidth"
        assert browser.execute_script(width) <= 360
        play(browser, items[0])
        assert browser.execute_script(width) <= 360
        assert browser.execute_script("return document.getElementById('player').scrollWidth") <= 360
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in ground[4:-1].split(",")) < 64
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def violations(browser):
    if not AXE.is_file():
        pytest.skip("no axe-core: unpack `npm pack axe-core` and set TVR_AXE to its axe.min.js")
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
    return [(each["id"], [node["html"][:80] for node in each["nodes"]]) for each in serious]


def test_axe_finds_nothing_serious(browser, address):
    items = ask(browser, address)
    assert violations(browser) == []
    browser.find_element(By.TAG_NAME, "summary").click()
    play(browser, items[0])
    assert violations(browser) == []
    press(browser, Keys.ESCAPE)
    start(browser, address)
    wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#library li"))
    assert violations(browser) == []
