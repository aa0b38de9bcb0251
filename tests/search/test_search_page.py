"""The page in a real browser: a query, thumbnails, a playing result, an uploaded clip, keys, a phone."""

import pytest

pytest.importorskip("selenium", reason="selenium drives the browser")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
from browser import serving, wait
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tvr_lightning.search import Searcher
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
