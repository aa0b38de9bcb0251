"""The page in a real browser: a query, thumbnails, a playing result, an uploaded clip, keys, a phone."""

import pytest

pytest.importorskip("selenium", reason="selenium drives the browser")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
from browser import serving, wait
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tvr_lightning.search import Searcher
from tvr_lightning.search.results import clock
from tvr_lightning.search.server import ServerOptions, create_app


@pytest.fixture(scope="module")
def address(indexed):
    with Searcher(indexed) as searcher, serving(create_app(searcher, ServerOptions())) as made:
        yield made


def ask(browser, address, query="a red square"):
    browser.get(address)
    wait(browser, lambda b: "8 videos" in b.find_element(By.ID, "state").text)
    browser.find_element(By.ID, "query").send_keys(query, Keys.ENTER)
    return wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#answers li"))


def test_a_query_gives_thumbnails_and_a_click_plays_at_the_best_moment(browser, address):
    items = ask(browser, address)
    assert len(items) == 8
    picture = items[0].find_element(By.TAG_NAME, "img")
    wait(browser, lambda b: b.execute_script("return arguments[0].naturalWidth", picture) == 224)
    assert len(items[0].find_elements(By.CSS_SELECTOR, ".strip i")) >= 3
    best = items[0].find_element(By.CLASS_NAME, "time").text
    minutes, seconds = best.split(":")
    items[0].find_element(By.CLASS_NAME, "play").click()
    video = wait(browser, lambda b: items[0].find_element(By.TAG_NAME, "video"))
    reached = 60 * int(minutes) + float(seconds) - 0.06
    wait(browser, lambda b: b.execute_script("return arguments[0].currentTime", video) >= reached)
    assert browser.execute_script("return arguments[0].error", video) is None
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors


def test_two_scorers_side_by_side(browser, address):
    ask(browser, address)
    browser.find_element(By.TAG_NAME, "summary").click()
    beside = browser.find_element(By.ID, "beside")
    beside.find_element(By.CSS_SELECTOR, "option[value=clip4clip]").click()
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "#answers section")) == 2)
    headings = [h.text for h in browser.find_elements(By.TAG_NAME, "h2")]
    assert headings == ["By gare", "By clip4clip"]


def test_an_uploaded_clip_finds_itself_first(browser, address, gallery):
    browser.get(address)
    browser.find_element(By.ID, "example").send_keys(str(gallery / "clip4.mp4"))
    # Read in one go: the list may be replaced between two questions to the browser.
    first = "return document.querySelector('#answers h3')?.textContent"
    assert wait(browser, lambda b: b.execute_script(first)) == "1. clip4.mp4"
    browser.find_element(By.CLASS_NAME, "similar").click()
    wait(browser, lambda b: b.execute_script(first) not in (None, "1. clip4.mp4"))


def test_bad_input_is_said_aloud(browser, address, tmp_path):
    fake = tmp_path / "fake.mp4"
    fake.write_text("no video")
    browser.get(address)
    browser.find_element(By.ID, "example").send_keys(str(fake))
    status = browser.find_element(By.ID, "status")
    wait(browser, lambda b: "the clip" in status.text)
    browser.find_element(By.ID, "query").send_keys("  ", Keys.ENTER)
    wait(browser, lambda b: "the query is empty" in status.text)
    assert status.get_attribute("aria-live") == "polite"


SHOWN = "return ['query', 'like'].map(id => document.getElementById(id)).map(e => e.value ?? e.textContent)"
FIRST = "return document.querySelector('#answers h3')?.textContent"


def test_the_box_shows_what_was_asked(browser, address, gallery):
    ask(browser, address)
    assert browser.execute_script(SHOWN) == ["a red square", ""]
    chip = browser.find_element(By.ID, "chip")
    assert not chip.is_displayed()
    name = browser.execute_script(FIRST).partition(" ")[2]
    browser.find_element(By.CLASS_NAME, "similar").click()
    wait(browser, lambda b: b.execute_script(FIRST).partition(" ")[2] != name)
    assert browser.execute_script(SHOWN) == ["", f"like {name}"]
    assert chip.is_displayed()
    browser.find_element(By.ID, "example").send_keys(str(gallery / "clip4.mp4"))
    wait(browser, lambda b: b.execute_script(FIRST) == "1. clip4.mp4")
    assert browser.execute_script(SHOWN) == ["", "like clip4.mp4"]
    query = browser.find_element(By.ID, "query")
    browser.execute_script("document.getElementById('answers').replaceChildren()")
    query.send_keys(Keys.ENTER)
    wait(browser, lambda b: b.execute_script(FIRST) == "1. clip4.mp4")  # an empty box beside a chip asks it again
    query.send_keys("half a question")
    browser.find_element(By.TAG_NAME, "summary").click()
    browser.find_element(By.ID, "top").clear()
    browser.find_element(By.ID, "top").send_keys("1", Keys.TAB)
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "#answers li")) == 1)
    assert browser.execute_script(SHOWN) == ["half a question", "like clip4.mp4"], "what is being typed stays"
    browser.execute_script("document.getElementById('answers').replaceChildren()")
    query.send_keys(Keys.ENTER)
    wait(browser, lambda b: not chip.is_displayed())
    wait(browser, lambda b: b.execute_script(FIRST))  # no list of a moment ago is clicked
    assert browser.execute_script(SHOWN) == ["half a question", ""]
    browser.find_element(By.CLASS_NAME, "similar").click()
    wait(browser, lambda b: chip.is_displayed())
    browser.find_element(By.ID, "forget").click()
    assert not chip.is_displayed()
    assert not browser.find_elements(By.CSS_SELECTOR, "#answers li")
    assert browser.switch_to.active_element.get_attribute("id") == "query"


def test_the_clock_of_the_page_is_that_of_the_command_line(browser, address):
    browser.get(address)
    times = [0.04, 9.96, 59.96, 63.3, 3599.96, 3723.4, 36000.0]
    assert browser.execute_script("return arguments[0].map(clock)", times) == [clock(each) for each in times]
    assert browser.execute_script("return clock(3723)") == "1:02:03.0"


def test_everything_stays_in_one_column_of_a_wide_window(browser, address):
    size = browser.get_window_size()
    browser.set_window_size(1900, 900)
    try:
        browser.get(address)
        edges = "return ['header', 'main', 'footer'].map(e => document.querySelector(e).getBoundingClientRect().left)"
        left = browser.execute_script(edges)
        assert left[0] > 0
        assert left == [left[0]] * 3
    finally:
        browser.set_window_size(size["width"], size["height"])


def test_arrows_move_among_results(browser, address):
    items = ask(browser, address)
    rows = [item.rect["y"] for item in items]
    columns = rows.count(rows[0])
    assert 1 < columns < 8

    def press(key):
        webdriver.ActionChains(browser).send_keys(key).perform()
        found = browser.execute_script(
            "return [...document.querySelectorAll('#answers li')].findIndex(li => li.contains(document.activeElement))"
        )
        return found if found >= 0 else browser.switch_to.active_element.get_attribute("id")

    assert browser.switch_to.active_element.get_attribute("id") == "query"
    assert press(Keys.ARROW_LEFT) == "query", "in the text, left and right move in the text"
    assert press(Keys.ARROW_UP) == "query"
    assert press(Keys.ARROW_DOWN) == 0
    outline = "return getComputedStyle(arguments[0].querySelector('article')).outlineStyle"
    assert [browser.execute_script(outline, item) for item in items[:2]] == ["solid", "none"], "it is seen where one is"
    assert press(Keys.ARROW_RIGHT) == 1
    assert press(Keys.ARROW_DOWN) == 1 + columns
    assert press(Keys.ARROW_UP) == 1
    webdriver.ActionChains(browser).key_down(Keys.CONTROL).send_keys(Keys.ARROW_DOWN).key_up(Keys.CONTROL).perform()
    assert items[1].find_element(By.CLASS_NAME, "play") == browser.switch_to.active_element
    webdriver.ActionChains(browser).send_keys(Keys.ENTER).perform()
    wait(browser, lambda b: items[1].find_elements(By.TAG_NAME, "video"))
    assert press(Keys.ARROW_DOWN) == 1, "a video keeps its own keys"
    assert press(Keys.ESCAPE) == 1
    assert press(Keys.ARROW_UP) == "query"
    browser.find_element(By.TAG_NAME, "summary").click()
    browser.find_element(By.ID, "top").click()
    assert press(Keys.ARROW_DOWN) == "top", "a number keeps its own keys"


def test_keys_alone_suffice(browser, address):
    ask(browser, address)
    act = webdriver.ActionChains(browser)
    browser.execute_script("document.activeElement.blur()")
    act.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    second = browser.find_elements(By.CSS_SELECTOR, "#answers li")[1]
    assert browser.execute_script("return arguments[0].contains(document.activeElement)", second)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait(browser, lambda b: second.find_elements(By.TAG_NAME, "video"))
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(browser, lambda b: not b.find_elements(By.TAG_NAME, "video"))
    webdriver.ActionChains(browser).send_keys("/").perform()
    assert browser.switch_to.active_element.get_attribute("id") == "query"


def test_everything_has_a_name_and_fits_a_phone_in_the_dark(browser, address):
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        ask(browser, address)
        browser.find_element(By.CLASS_NAME, "similar").click()
        wait(browser, lambda b: b.find_element(By.ID, "chip").is_displayed())
        browser.execute_script("document.getElementById('like').textContent += ' of a very long name'.repeat(9)")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in ground[4:-1].split(",")) < 64
        browser.find_element(By.TAG_NAME, "summary").click()
        named = "return [...document.querySelectorAll('button, input, select')].filter(e => e.offsetParent)"
        for element in browser.execute_script(named):
            assert element.accessible_name, element.get_attribute("outerHTML")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
