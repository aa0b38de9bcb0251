"""Invalid requests and files get a one-line error, and the server continues to answer."""

import http.client
import io
import json
import struct
import threading
import time
import zlib

import av
import pytest
from browser import serving
from PIL import Image
from search_parts import save_checkpoint, write_clip

pytest.importorskip("fastapi", reason="the extra `search` is not installed")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")

import torch

from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.search.catalog import FILE
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource
from tvr_lightning.search.server import ServerOptions, create_app


@pytest.fixture(scope="module")
def searcher(indexed):
    with Searcher(indexed) as made:
        yield made


@pytest.fixture(scope="module")
def address(searcher):
    with serving(create_app(searcher, ServerOptions())) as made:
        yield made.removeprefix("http://").rstrip("/")


def ask(address, path, body=None, headers=()):
    """Status, headers and content of an answer."""
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request("GET" if body is None else "POST", path, body, dict(headers))
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def said(answer):
    return json.loads(answer[2])["detail"]


def png(width, height):
    """A small file whose header declares an image of any size."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = zlib.compress(b"\0" * 1_000_000)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def picture(size=(80, 60), kind="PNG", colour="red"):
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, kind)
    return content.getvalue()


def test_other_sites_can_embed_nothing(address, searcher):
    video = searcher.catalog.videos()[0].id
    for path in ("/", "/app.js", f"/api/videos/{video}/file", f"/api/videos/{video}/picture", "/api/videos/x/file"):
        assert ask(address, path)[1]["Cross-Origin-Resource-Policy"] == "same-origin", path


@pytest.mark.parametrize("origin", ["http://elsewhere.example", "null", "http://127.0.0.1:1", "nonsense"])
def test_an_older_browser_on_another_site_gets_no_answer(address, origin, gallery):
    for path, body in (("/api/search?query=a", None), ("/api/index", None), ("/api/examples", b"x")):
        answer = ask(address, path, body, {"Origin": origin})
        assert answer[0] == 403
        assert "other origins" in said(answer)
    own = {"Origin": f"http://{address}"}
    assert ask(address, "/api/search?query=a", None, own)[0] == 200
    assert ask(address, "/api/examples", (gallery / "clip1.mp4").read_bytes(), own)[0] == 200


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_picture_finds_videos(address, kind):
    status, _, content = ask(address, "/api/examples?kind=image", picture(kind=kind))
    assert status == 200
    status, _, content = ask(address, f"/api/search?top=3&like={json.loads(content)['id']}")
    assert status == 200
    assert len(json.loads(content)["results"]) == 3


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"<html>I am a picture</html>", 422, "the image is not in a supported image format"),
        (b"", 400, "empty"),
        (png(50_000, 50_000), 422, "the image cannot be read as an image (Image size"),
        (png(9_000, 9_000), 422, "the image has 9,000 x 9,000 pixels"),
        (picture(kind="JPEG")[:300], 422, "the image cannot be read as an image"),
    ],
)
def test_what_is_no_picture_is_said(address, body, status, words):
    answer = ask(address, "/api/examples?kind=image", body)
    assert answer[0] == status
    assert words in said(answer)
    assert "/tmp" not in said(answer)
    assert ask(address, "/health")[0] == 200


def test_a_clip_of_no_length_is_said(address, tmp_path):
    with av.open(str(tmp_path / "none.mp4"), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    answer = ask(address, "/api/examples", (tmp_path / "none.mp4").read_bytes())
    assert answer[0] == 422
    assert said(answer).startswith("the clip ")
    assert ask(address, "/health")[0] == 200


def test_files_that_name_other_files_are_refused_by_their_format(gallery, address, tmp_path, sources):
    videos = tmp_path / "videos"
    write_clip(videos / "clip.mp4", 1)
    secret = (gallery / "clip2.mp4").resolve()
    texts = {
        "absolute.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\n{secret}\n#EXT-X-ENDLIST\n",
        "hidden.mp4": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\n{secret}\n#EXT-X-ENDLIST\n",
        "beside.ffconcat": "ffconcat version 1.0\nfile clip.mp4\n",
        "beside.mkv": "ffconcat version 1.0\nfile clip.mp4\n",
        "manifest.mp4": '<?xml version="1.0"?>\n<MPD><BaseURL>clip.mp4</BaseURL></MPD>',
    }
    for name, text in texts.items():
        (videos / name).write_text(text)
    report = index([videos, *(videos / name for name in texts)], tmp_path / "index", sources[1:], progress=False)
    assert report.total == 1
    reasons = {line.rpartition("/")[2].partition(":")[0]: line for line in report.skipped}
    for name in texts:
        assert "cannot be opened as video" in reasons[name]
        answer = ask(address, "/api/examples", (videos / name).read_bytes())
        assert answer[0] == 422
        assert "cannot be opened" in said(answer)


@pytest.fixture(scope="module")
def wordy(tmp_path_factory, gallery):
    """An index with 1,200 captions, and 1,200 queries of its bank."""
    folder = tmp_path_factory.mktemp("wordy")
    torch.manual_seed(0)
    encoder = {"width": 128, "image_size": 32, "text_layers": 6, "vision_layers": 1}
    module = CLIP4Clip(TinyClipEncoder(**encoder), words=32, frames=2)
    checkpoint = save_checkpoint(module, encoder, {"words": 32, "frames": 2}, folder / "method.ckpt")
    bank = [f"caption {number} of a person who does something {number % 7} times" for number in range(1200)]
    index([gallery], folder / "index", [ScorerSource(str(checkpoint))], bank=bank, progress=False)
    return folder / "index"


def test_a_bank_of_1200_queries_delays_a_search_for_no_longer_than_a_block(wordy):
    with Searcher(wordy) as searcher, serving(create_app(searcher, ServerOptions())) as made:
        address = made.removeprefix("http://").rstrip("/")
        scorer = searcher.scorers[searcher.first]
        blocks, encode = [], scorer.encode_texts

        def slow(texts):
            if len(texts) > 1:
                blocks.append(time.monotonic())
                time.sleep(0.05)
            return encode(texts)

        scorer.encode_texts = slow
        answers = []
        long = threading.Thread(target=lambda: answers.append(ask(address, "/api/search?query=a&normalize=sinkhorn")))
        long.start()
        while not blocks:
            time.sleep(0.01)
        began = len(blocks)
        assert ask(address, "/api/search?query=a+red+square")[0] == 200
        assert len(blocks) - began < 1200 // 64 // 2, "the search did not wait for the texts"
        assert not answers
        long.join()
        assert answers[0][0] == 200
        assert len(blocks) == -(-1200 // 16)


def test_an_index_of_an_older_format_is_said(indexed, tmp_path, capsys):
    import shutil
    import sqlite3

    old = tmp_path / "old"
    shutil.copytree(indexed, old)
    with sqlite3.connect(old / FILE) as connection:
        connection.execute("UPDATE facts SET value = '1' WHERE name = 'version'")
    connection.close()
    for words in (["serve", "--index", str(old)], ["search", "a", "--index", str(old)], ["index", "--out", str(old)]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "was built by an older version. Build it again with tvr index" in said
        assert len(said.splitlines()) == 1
