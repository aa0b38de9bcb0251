"""Create docs/images/overview.webp: the leaderboard of a report next to the search page, in a real browser.

Command: python benchmarks/screenshots.py --report FOLDER/report/index.html --index INDEX --out overview.webp
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WIDTH, HEIGHT = 900, 1000
QUERY = "a small yellow star moves up"
PORT = 8321
PATIENCE = 120  # seconds


def browser(profile: str) -> Any:
    """Open Chromium without a window, in light colors."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False},
    )
    return driver


def screenshot(driver: Any) -> Image.Image:
    """Return a screenshot of the page."""
    return Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")


def search_page(driver: Any, index: Path) -> Image.Image:
    """Serve the index, search, and return the page with its results."""
    command = [sys.executable, "-m", "tvr_lightning.cli", "serve", "--index", str(index), "--port", str(PORT)]
    server = subprocess.Popen(command)
    try:
        end = time.monotonic() + PATIENCE
        while server.poll() is None and time.monotonic() < end:
            try:
                urlopen(f"http://127.0.0.1:{PORT}/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        driver.get(f"http://127.0.0.1:{PORT}/?q={QUERY.replace(' ', '+')}")
        WebDriverWait(driver, PATIENCE).until(lambda page: page.find_elements(By.CSS_SELECTOR, "#answers article img"))
        time.sleep(3)  # thumbnails
        return screenshot(driver)
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Combine both pages into one image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True, help="report/index.html of a tvr reproduce folder")
    parser.add_argument("--index", type=Path, required=True, help="index created by make demo")
    parser.add_argument("--out", type=Path, required=True, help="image to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)
        try:
            driver.get(arguments.report.resolve().as_uri())
            time.sleep(2)  # charts
            pages = [screenshot(driver), search_page(driver, arguments.index)]
        finally:
            driver.quit()
    image = Image.new("RGB", (2 * WIDTH, HEIGHT), "white")
    for column, page in enumerate(pages):
        image.paste(page, (column * WIDTH, 0))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    image.save(arguments.out, quality=80, method=6)
    print(
        f"Wrote {arguments.out}: {image.width} x {image.height} pixels, {arguments.out.stat().st_size / 1024:.0f} KiB"
    )


if __name__ == "__main__":
    main()
