"""A headless browser, and a server on a free port of this machine."""

import os
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

AXE = Path(os.environ.get("TVR_AXE", ""))
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="unpack `npm pack axe-core` and set TVR_AXE to its axe.min.js")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PATIENCE = 60


@contextmanager
def serving(app):
    """Serve an application from a thread; yields the address of its page."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def open_browser(profile):
    """Open Chromium without a window, or skip the test if it is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
    if not CHROMIUM or not DRIVER:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--mute-audio"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def wait(browser, condition):
    """Return the value of a condition as soon as it is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, PATIENCE, poll_frequency=0.1).until(condition)


def find(browser, css):
    """Return the first element of a CSS selector."""
    return browser.find_element("css selector", css)


def violations(browser):
    """Serious violations of the rules for accessible pages that axe finds on the open page."""
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run({preload: false}).then(arguments[0])")
    assert len(found["passes"]) > 15
    serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
    return [(each["id"], [node["html"][:80] for node in each["nodes"]]) for each in serious]
