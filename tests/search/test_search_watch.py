"""`tvr index --watch`: new, changed and removed videos are taken in while searches are answered."""

import http.client
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from browser import serving
from search_parts import write_clip

from tvr_lightning.search import Searcher, index
from tvr_lightning.search.watching import Watch


class Looks:
    """Does one thing before each look, instead of waiting."""

    def __init__(self, *steps):
        self.steps, self.reports = list(steps), []

    def __call__(self, seconds):
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()

    def tell(self, report):
        self.reports.append((report.added, report.kept, report.removed, report.total))


def still():
    """Nothing happens."""


@pytest.fixture
def videos(tmp_path):
    write_clip(tmp_path / "videos" / "one.mp4", 1)
    write_clip(tmp_path / "videos" / "below" / "two.mp4", 2)
    return tmp_path / "videos"


def test_new_changed_and_removed_videos_are_taken_in(videos, sources, tmp_path):
    said = []
    looks = Looks(
        lambda: write_clip(videos / "three.mp4", 3),
        still,
        lambda: write_clip(videos / "three.mp4", 4, frames=8),
        still,
        lambda: (videos / "one.mp4").unlink(),
        still,
        still,
    )
    watch = Watch(0, said.append, looks)
    index([videos], tmp_path / "index", sources[1:], "exact", progress=False, watch=watch, tell=looks.tell)
    assert looks.reports == [(2, 0, 0, 2), (1, 2, 0, 3), (1, 2, 0, 3), (0, 2, 1, 2)]
    assert said == []


def test_a_file_is_taken_once_it_stands_still(videos, sources, tmp_path):
    whole = (videos / "one.mp4").read_bytes()

    def grow(share):
        (videos / "three.mp4").write_bytes(whole[: int(share * len(whole))])

    looks = Looks(lambda: grow(0.3), lambda: grow(0.6), lambda: grow(1.0), still, still)
    watch = Watch(0, print, looks)
    index([videos], tmp_path / "index", sources[1:], "exact", progress=False, watch=watch, tell=looks.tell)
    assert looks.reports == [(2, 0, 0, 2), (1, 2, 0, 3)]


def test_a_folder_that_vanishes_is_said_and_the_rest_goes_on(videos, sources, tmp_path):
    other = tmp_path / "other"
    write_clip(other / "kept.mp4", 5)
    said = []
    looks = Looks(
        lambda: videos.rename(tmp_path / "away"),
        still,
        lambda: write_clip(other / "more.mp4", 6),
        still,
        lambda: (tmp_path / "away").rename(videos),
        still,
        still,
    )
    watch = Watch(0, said.append, looks)
    index([videos, other], tmp_path / "index", sources[1:], "exact", progress=False, watch=watch, tell=looks.tell)
    assert looks.reports == [(3, 0, 0, 3), (1, 1, 0, 4)], "what is not there is neither read nor forgotten"
    assert len(said) == 1
    assert str(videos) in said[0]
    assert "stay in the index" in said[0]
    with Searcher(tmp_path / "index") as searcher:
        assert searcher.catalog.count() == 4


def test_a_watched_folder_whose_disk_is_unmounted_loses_nothing(videos, sources, tmp_path):
    def empty():
        videos.rename(tmp_path / "unmounted")
        videos.mkdir()

    looks, problems = Looks(empty, still, still), []

    def tell(report):
        looks.tell(report)
        problems.extend(report.problems)

    index([videos], tmp_path / "index", sources[1:], "exact", progress=False, watch=Watch(0, print, looks), tell=tell)
    assert looks.reports == [(2, 0, 0, 2), (0, 0, 0, 2)]
    assert f"{videos}: contains none of its 2 indexed videos" in problems[0]


@pytest.mark.slow
def test_200_searches_at_once_while_a_folder_is_watched(videos, sources, tmp_path, ended):
    pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
    from tvr_lightning.search.server import ServerOptions, create_app

    out = tmp_path / "index"
    index([videos], out, sources[1:], "exact", progress=False)
    command = [sys.executable, "-m", "tvr_lightning.cli", "index", "--out", str(out), "--watch", "--device", "cpu"]
    watcher = ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
    assert any("2 kept" in line for line in iter(watcher.stdout.readline, ""))
    statuses, stop = Counter(), threading.Event()
    with Searcher(out) as searcher, serving(create_app(searcher, ServerOptions(max_pending=256))) as made:
        address = made.removeprefix("http://").rstrip("/")
        gate = threading.Barrier(200)

        def ask(number):
            gate.wait()
            for _ in range(3):
                connection = http.client.HTTPConnection(address, timeout=300)
                connection.request("GET", f"/api/search?query=a+red+square+{number}")
                answer = connection.getresponse()
                statuses[answer.status] += 1
                answer.read()
                connection.close()

        def change():
            for number in range(100):
                if stop.is_set():
                    return
                write_clip(videos / f"new{number % 7}.mp4", number)
                time.sleep(0.5)

        writer = threading.Thread(target=change)
        writer.start()
        with ThreadPoolExecutor(200) as pool:
            list(pool.map(ask, range(200)))
        stop.set()
        writer.join()
        end = time.monotonic() + 120
        wanted = len(list(videos.rglob("*.mp4")))
        while searcher.catalog.count() != wanted and time.monotonic() < end:
            time.sleep(0.2)
        assert searcher.catalog.count() == wanted
        assert searcher.search("a").videos == wanted
    assert statuses == {200: 600}
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(60) == 0


def test_the_command_ends_by_itself_where_it_cannot_begin(tmp_path):
    command = [sys.executable, "-m", "tvr_lightning.cli", "index", str(Path(tmp_path) / "nowhere"), "--watch"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "no such file or folder" in ended.stderr
