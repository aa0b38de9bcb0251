"""Texts of a video: a large bank costs searches beside it nothing, and whoever leaves costs nothing more."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from browser import serving
from search_parts import save_checkpoint, write_clip

pytest.importorskip("fastapi", reason="the extra `search` is not installed")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
pytest.importorskip("httpx", reason="httpx drives the application in tests")
from starlette.testclient import TestClient

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.search import ScorerSource, Searcher, index
from tvr_lightning.search.errors import GivenUpError
from tvr_lightning.search.server import ServerOptions, create_app

COUNT = 1000
BANK = [f"query {number} of a person who does something {number % 7} times" for number in range(COUNT)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An index of two clips whose texts take seconds to encode."""
    folder = tmp_path_factory.mktemp("texts")
    torch.manual_seed(0)
    encoder = {"width": 128, "image_size": 32, "text_layers": 6, "vision_layers": 1}
    module = CLIP4Clip(TinyClipEncoder(**encoder), words=32, frames=2)
    checkpoint = save_checkpoint(module, encoder, {"words": 32, "frames": 2}, folder / "method.ckpt")
    for number in range(2):
        write_clip(folder / "videos" / f"{number}.mp4", number)
    source = ScorerSource(str(checkpoint))
    index([folder / "videos"], folder / "index", [source], bank=BANK, progress=False)
    return folder / "index"


@pytest.fixture
def searcher(made):
    with Searcher(made) as opened:
        yield opened


@pytest.fixture
def app(searcher):
    return create_app(searcher, ServerOptions())


@pytest.fixture
def address(app):
    with serving(app) as made:
        yield made.removeprefix("http://").rstrip("/")


def get(address, path):
    """Status, content and the moment of the answer."""
    connection = http.client.HTTPConnection(address, timeout=300)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, time.monotonic()


def running(app):
    return app.state.limit.inside


def until(condition, seconds=60):
    """Wait for a condition; says whether it came."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_a_search_beside_texts_is_answered_first_and_texts_are_encoded_once(searcher, address, app):
    video = searcher.catalog.videos()[0].id
    path = f"/api/videos/{video}/texts?top=3"
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(get, address, path)
        assert until(lambda: running(app) == 1)
        status, _, searched = get(address, "/api/search?query=a%20red%20square")
        assert status == 200
        status, content, answered = texts.result()
    assert status == 200
    assert searched < answered, "a search waits for a block of texts, not for all"
    asked = time.monotonic()
    status, again, repeated = get(address, path)
    assert (status, again) == (200, content)
    assert repeated - asked < (answered - began) / 4, "what was encoded is kept"
    scorer = searcher.scorers[searcher.first]
    features = searcher.catalog.features(searcher.catalog.spans(video)[0].key, searcher.first)[0]
    scores = scorer.score(scorer.encode_texts(BANK), features).similarity[:, 0]
    best = scores.topk(3)
    found = json.loads(content)
    assert [each["score"] for each in found] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert [scores[BANK.index(each["text"])] for each in found] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_searches_beside_the_first_normalised_one_are_answered_while_the_bank_is_encoded(address, app):
    with ThreadPoolExecutor(1) as pool:
        normalised = pool.submit(get, address, "/api/search?query=a%20red%20square&normalize=sinkhorn")
        assert until(lambda: running(app) == 1)
        times = [get(address, "/api/search?query=a%20red%20square") for _ in range(2)]
        status, _, answered = normalised.result()
    assert [each[0] for each in times] == [200, 200]
    assert status == 200
    assert times[-1][2] < answered, "biases wait for the whole bank, and other searches for a block of it at most"


def test_requests_whose_clients_left_stop_computing(searcher, address, app):
    host, _, port = address.partition(":")
    video = searcher.catalog.videos()[0].id
    request = f"GET /api/videos/{video}/texts HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()
    lines = []
    for _ in range(45):
        line = socket.create_connection((host, int(port)))
        line.sendall(request)
        lines.append(line)
    assert until(lambda: running(app) > 1)
    for line in lines:
        line.close()
    asked = time.monotonic()
    status, _, answered = get(address, "/health")
    assert status == 200
    assert answered - asked < 5
    assert until(lambda: running(app) == 0, 20), "places are free again"
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.5, "nothing is computed for nobody"
    assert get(address, "/api/search?query=a")[0] == 200


def test_what_was_encoded_for_one_who_left_serves_the_next(searcher):
    video = searcher.catalog.videos()[0].id
    asked = []

    def given_up():
        asked.append(time.monotonic())
        return len(asked) > 5

    with pytest.raises(GivenUpError):
        searcher.describe(video, given_up=given_up)
    encoded = len(searcher._own_texts()._done)
    assert 0 < encoded < COUNT // 64
    searcher.catalog.set_fact("other", 1)
    assert len(searcher._own_texts()._done) == encoded, "a change of the index that leaves the texts costs nothing"
    bank = searcher.catalog.fact("bank")
    searcher.catalog.set_fact("bank", ["something else"])
    try:
        assert [text for text, _ in searcher.describe(video)] == ["something else"]
    finally:
        searcher.catalog.set_fact("bank", bank)


def test_several_ask_at_once_and_each_block_is_encoded_by_one(searcher):
    searcher.catalog.set_fact("bank", BANK[:200])
    try:
        scorer, videos = searcher.scorers[searcher.first], [row.id for row in searcher.catalog.videos()]
        gate = threading.Barrier(4)

        def ask(number):
            gate.wait()
            return searcher.describe(videos[number % 2], 5)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, range(4)))
        assert found[0] == found[2]
        assert found[1] == found[3]
        assert sum(map(len, searcher._own_texts()._done)) == 200
        features = searcher.catalog.features(searcher.catalog.spans(videos[0])[0].key, searcher.first)[0]
        expected = scorer.score(scorer.encode_texts(BANK[:200]), features).similarity[:, 0].topk(5).values
        assert [score for _, score in found[0]] == pytest.approx(expected.tolist(), abs=1e-5)
    finally:
        searcher.catalog.set_fact("bank", BANK)


def test_texts_take_a_place_among_the_searches_and_none_for_other_sites(searcher):
    app = create_app(searcher, ServerOptions(max_pending=1))
    client = TestClient(app, base_url="http://127.0.0.1")
    video = searcher.catalog.videos()[0].id
    with app.state.limit.enter():
        assert client.get(f"/api/videos/{video}/texts").status_code == 429
    for path in (f"/api/videos/{video}/texts", f"/api/search?like={video}", "/api/search?query=a"):
        for site in ("cross-site", "same-site"):
            assert client.get(path, headers={"Sec-Fetch-Site": site}).status_code == 403
    assert client.get("/api/index", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200
    assert client.get("/api/search?query=a", headers={"Sec-Fetch-Site": "none"}).status_code == 200
