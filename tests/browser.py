"""A browser without a window, and a server for it on a free port of this machine."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PATIENCE = 60


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application from a thread; gives the address of its page."""
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
def open_browser(profile: Path) -> Iterator[Any]:
    """Open Chromium without a window; skips the test, and says what is missing, where there is none."""
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


def wait(browser: Any, condition: Callable[[Any], Any]) -> Any:
    """Return what a condition gives as soon as that is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, PATIENCE, poll_frequency=0.1).until(condition)
