"""Create search.webp and run.webp in docs/images: the search page and the report of the demo, in a real browser.

The query is the shortest held-out caption whose video the search ranks first, as the only good match. The exit status
is 1 if there is no such caption.

Command: python benchmarks/screenshots.py --demo build/demo --out docs/images
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tvr_lightning.data import MSRVTT
from tvr_lightning.search.relevance import GOOD

WIDTH, HEIGHT = 1280, 820
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


def answered_query(videos: Path) -> str:
    """Return the shortest held-out caption whose video the running server ranks first, as the only good match."""
    split = MSRVTT(root=str(videos)).read_split("test")
    for text in sorted(split.texts, key=lambda each: (len(each.text), each.text)):
        with urlopen(f"http://127.0.0.1:{PORT}/api/search?{urlencode({'query': text.text, 'top': 12})}") as answer:
            first, *others = json.load(answer)["results"]
        found = Path(first["path"]).stem == split.videos[text.video].video_id and first["relevance"] >= GOOD
        if found and all(other["relevance"] < GOOD for other in others):
            return text.text
    raise SystemExit(f"{videos}: no caption finds its own video as the only good match. Run make demo.")


def search_page(driver: Any, index: Path, videos: Path) -> Image.Image:
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
        driver.get(f"http://127.0.0.1:{PORT}/?{urlencode({'query': answered_query(videos)})}")
        WebDriverWait(driver, PATIENCE).until(lambda page: page.find_elements(By.CSS_SELECTOR, "#answers article img"))
        time.sleep(3)  # thumbnails
        return screenshot(driver)
    finally:
        server.terminate()
        server.wait()


def run_page(driver: Any, runs: Path) -> Image.Image:
    """Report on the runs and return the page of one."""
    command = [sys.executable, "-m", "tvr_lightning.cli", "report", str(runs), "--tables_only"]
    subprocess.run(command, check=True)
    page = next((runs / "report" / "runs").glob("*.html"))
    driver.get(page.absolute().as_uri())
    return screenshot(driver)


def main() -> None:
    """Write the images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="folder that make demo filled")
    parser.add_argument("--out", type=Path, required=True, help="folder of the images")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)
        try:
            images = {
                "search.webp": search_page(driver, arguments.demo / "index", arguments.demo),
                "run.webp": run_page(driver, arguments.demo / "runs"),
            }
        finally:
            driver.quit()
    for name, image in images.items():
        path = arguments.out / name
        image.save(path, quality=80, method=6)
        print(f"Wrote {path}: {image.width} x {image.height} pixels, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
