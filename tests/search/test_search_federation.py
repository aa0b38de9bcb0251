"""Several indexes asked at once: they answer as one would, and the rest answers where some do not."""

import dataclasses
import http.server
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from browser import serving
from search_parts import save_checkpoint

pytest.importorskip("fastapi", reason="the extra `search` is not installed")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
pytest.importorskip("httpx", reason="httpx drives the application in tests")
from starlette.testclient import TestClient

from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.search import ScorerSource, Searcher, SearchError, index
from tvr_lightning.search.federation import Federation, open_indexes
from tvr_lightning.search.filters import Filter
from tvr_lightning.search.limits import ConcurrencyLimit
from tvr_lightning.search.local import LocalIndex
from tvr_lightning.search.remote import RemoteIndex
from tvr_lightning.search.server import ServerOptions, create_app
from tvr_lightning.search.source import SearchRequest, UnansweredError

LOCAL = "http://127.0.0.1"
PARTS = {"a": (0, 1, 2), "b": (3, 4, 5), "c": (6, 7)}
SAID = [
    ("clip1", 0.5, 1.5, "the quick fox"),
    ("clip4", 0.0, 1.0, "a fox and a quick hound"),
    ("clip6", 1.0, 2.0, "fox"),
]


@pytest.fixture(scope="module")
def made(gallery, checkpoints, tmp_path_factory):
    """Three indexes of three folders, and `all`, one index of all three."""
    folder = tmp_path_factory.mktemp("several")
    speech = folder / "speech.csv"
    lines = [f"{name}.mp4,{start},{end},{text}" for name, start, end, text in SAID]
    speech.write_text("\n".join(["video_id,start,end,text", *lines]))
    for name, numbers in PARTS.items():
        (folder / "videos" / name).mkdir(parents=True)
        for number in numbers:
            shutil.copy(next(gallery.rglob(f"clip{number}.mp4")), folder / "videos" / name)
    scorers = [ScorerSource(str(path)) for path in checkpoints.values()]
    for name in PARTS:
        index([folder / "videos" / name], folder / name, scorers, "exact", progress=False, transcripts=speech)
    every = [folder / "videos" / name for name in PARTS]
    index(every, folder / "all", scorers, "exact", progress=False, transcripts=speech)
    return folder


@pytest.fixture(scope="module")
def union(made):
    with Searcher(made / "all") as searcher:
        yield LocalIndex(searcher)


@pytest.fixture(scope="module")
def far(made):
    """The address of a server that has the third index."""
    with Searcher(made / "c") as searcher, serving(create_app(searcher, ServerOptions())) as address:
        yield address.rstrip("/")


@contextmanager
def opened(made, *more, patience=10.0, names=("a", "b")):
    source, _ = open_indexes([*(str(made / name) for name in names), *more], patience, "cpu")
    with source:
        yield source


@pytest.fixture(scope="module")
def several(made, far):
    with opened(made, far) as source:
        yield source


@contextmanager
def listening(answer=None):
    """A server on a real socket that accepts; what it says is up to `answer(connection)`, or nothing."""
    ended = threading.Event()

    def accept():
        while not ended.is_set():
            try:
                line, _ = server.accept()
            except OSError:
                return
            held.append(line)
            if answer is not None:
                threading.Thread(target=talk, args=(line,), daemon=True).start()

    def talk(line):
        try:
            line.recv(65536)
            answer(line)
            line.close()
        except OSError:
            pass

    held = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"{LOCAL}:{server.getsockname()[1]}"
        finally:
            ended.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for line in held:
                line.close()


def nobody():
    """An address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"{LOCAL}:{taken.getsockname()[1]}"


def replying(content, kind="application/json", status="200 OK"):
    def answer(line):
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        line.sendall(head.encode() + content)

    return answer


def comparable(answer):
    """An answer without what says which index and which of its candidates a video is."""
    plain = answer.plain()
    for result in plain["results"]:
        for name in ("id", "index", "first_rank"):
            del result[name]
    return plain


def same(found, expected, where=""):
    """Check that two plain values are the same but for rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, each in enumerate(expected):
            same(found[place], each, f"{where}[{place}]")
    else:
        assert found == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected), where


REQUESTS = {
    "words": SearchRequest("a red square"),
    "few": SearchRequest("a red square", top=3),
    "vectors": SearchRequest("something blue", rerank="none", top=5),
    "another method": SearchRequest("something blue", rerank="clip4clip"),
    "filtered": SearchRequest("a red square", only=Filter(path="clip4")),
    "not this": SearchRequest("a red square", without="blue"),
    "threshold": SearchRequest("a red square", threshold=0.3),
    "none of it": SearchRequest("a red square", threshold=1.0),
    "nothing fits": SearchRequest("a cat", only=Filter(path="nowhere")),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_several_indexes_answer_as_one_of_all_their_videos(several, union, name):
    found, expected = several.search(REQUESTS[name]), union.search(REQUESTS[name])
    same(comparable(found), comparable(expected))
    assert {result.index.partition(":")[0] for result in found.results} <= {"a", "b", "http"}


def test_what_is_said_is_fused_over_all(several, union):
    found, expected = (source.search(SearchRequest("quick fox")) for source in (several, union))
    assert {r.path for r in found.results if r.said} == {r.path for r in expected.results if r.said}
    assert [r.by_sight for r in sorted(found.results, key=lambda r: r.by_sight)] == list(range(1, 9))
    said = [place for place, result in enumerate(found.results) if result.said]
    assert said == list(range(len(said))), "what is both seen and said comes first"


def test_examples_are_compared_in_all_indexes_wherever_they_lie(several, union, gallery):
    clip = gallery / "clip2.mp4"
    like = [source.read(clip, "clip", "clip2.mp4") for source in (several, union)]
    by_clip = [source.search(SearchRequest(like=[each])) for source, each in zip((several, union), like, strict=True)]
    same(comparable(by_clip[0]), comparable(by_clip[1]))
    itself = by_clip[0].results[0]
    assert itself.path == "clip2.mp4"
    assert [moment.time for moment in itself.best] == sorted(moment.time for moment in itself.moments)[:3], "all equal"
    for name in ("clip1.mp4", "clip7.mp4"):  # of this machine, and of the other server
        ids = [
            next(v["id"] for v in s.library(Filter(), 100, 0)["videos"] if v["path"] == name) for s in (several, union)
        ]
        answers = [
            source.search(SearchRequest("a red square", like=[source.example(video)], unlike=[each]))
            for source, video, each in zip((several, union), ids, like, strict=True)
        ]
        same(comparable(answers[0]), comparable(answers[1]))
        assert name not in {result.path for result in answers[0].results}


def test_library_facets_and_state_are_those_of_all(several, union, far):
    every = several.library(Filter(), 100, 0)
    assert every["count"] == 8
    pages = [several.library(Filter(), 3, after)["videos"] for after in (0, 3, 6, 9)]
    assert [video for page in pages for video in page] == every["videos"]
    assert {video["path"] for video in every["videos"]} == {f"clip{number}.mp4" for number in range(8)}
    assert several.facets() == union.facets()
    state = several.state()
    assert state["videos"] == 8
    assert state["scorers"] == ["gare", "clip4clip"]
    assert state["normalize"] == ["none"]
    assert state["indexes"] == [
        {"name": "a", "videos": 3, "problem": ""},
        {"name": "b", "videos": 3, "problem": ""},
        {"name": far, "videos": 2, "problem": ""},
    ]


def test_files_pictures_and_facts_of_another_server_come_through_the_serving_address(several, made):
    client = TestClient(create_app(several, ServerOptions()), base_url=LOCAL)
    found = client.get("/api/search", params={"query": "a red square"}).json()["results"]
    assert len(found) == 8
    for result in found:
        folder = next(folder for folder in PARTS if (made / "videos" / folder / result["path"]).is_file())
        content = (made / "videos" / folder / result["path"]).read_bytes()
        whole = client.get(f"/api/videos/{result['id']}/file")
        assert (whole.status_code, whole.content, whole.headers["content-type"]) == (200, content, "video/mp4")
        part = client.get(f"/api/videos/{result['id']}/file", headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content[10:20])
        assert part.headers["content-range"] == f"bytes 10-19/{len(content)}"
        beyond = client.get(f"/api/videos/{result['id']}/file", headers={"Range": f"bytes={len(content)}-"})
        assert beyond.status_code == 416
        about = client.get(f"/api/videos/{result['id']}/about").json()
        assert (about["id"], about["path"], about["index"]) == (result["id"], result["path"], result["index"])
        picture = client.get(f"/api/videos/{result['id']}/picture", params={"time": about["pictures"][0]})
        assert picture.content[:3] == b"\xff\xd8\xff"
        similar = client.get(f"/api/videos/{result['id']}/similar").json()["results"]
        assert result["id"] not in [each["id"] for each in similar]
        assert len(similar) == 7
        refused = client.get(f"/api/videos/{result['id']}/texts")
        assert refused.status_code == 400
        assert "no texts" in refused.json()["detail"]
    for wrong in ("0" * 16, "0" * 24, found[0]["id"][:8] + "0" * 16):
        assert client.get(f"/api/videos/{wrong}/about").status_code == 404
        assert client.get(f"/api/videos/{wrong}/file").status_code == 404


def test_an_uploaded_example_serves_several_searches(several, gallery):
    client = TestClient(create_app(several, ServerOptions()), base_url=LOCAL)
    for number in (1, 7):
        content = next(gallery.rglob(f"clip{number}.mp4")).read_bytes()
        kept = client.post("/api/examples", content=content, params={"name": "mine"}).json()["id"]
        found = client.get("/api/search", params={"like": kept}).json()["results"]
        assert (found[0]["path"], found[0]["score"]) == (f"clip{number}.mp4", pytest.approx(1.0, abs=1e-4))
        at_once = client.post("/api/search/video", content=content).json()["results"]
        assert [each["id"] for each in at_once] == [each["id"] for each in found]


def test_servers_alone_serve_without_a_model_of_their_own(far, made, gallery):
    with Searcher(made / "a") as searcher, serving(create_app(searcher, ServerOptions())) as other:
        source, _ = open_indexes([far, other.rstrip("/")], 10.0, "cpu")
        with source:
            assert len(source.search(SearchRequest("a red square")).results) == 5
            example = source.read(gallery / "clip1.mp4", "clip", "mine")
            assert source.search(SearchRequest(like=[example])).results[0].path == "clip1.mp4"


def test_the_rest_answers_where_one_is_dead(made, far, capsys):
    dead = nobody()
    indexes = [str(made / "a"), far, dead]
    source, silent = open_indexes(indexes, 10.0, "cpu")
    sentence = f"{dead} cannot be reached (Connection refused)"
    assert silent == [sentence]
    with source:
        answer = source.search(SearchRequest("a red square"))
        assert len(answer.results) == 5
        assert (answer.unanswered, answer.notes[0]) == ([dead], sentence)
        client = TestClient(create_app(source, ServerOptions()), base_url=LOCAL)
        assert client.get("/api/search", params={"query": "a"}).json()["unanswered"] == [dead]
        problems = {each["name"]: each["problem"] for each in client.get("/api/index").json()["indexes"]}
        assert problems == {"a": "", far: "", dead: sentence}
        assert client.get("/health").status_code == 200
    words = [option for each in indexes for option in ("--index", each)]
    assert main(["search", "a red square", *words, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"note: {sentence}\n" in said
    assert f"{far}: clip" in said
    assert "  5. " in said


def test_one_that_accepts_and_does_not_answer_costs_its_time_once(made):
    with listening() as mute, opened(made, mute, patience=1.0) as source:
        began = time.monotonic()
        answer = source.search(SearchRequest("a red square"))
        assert time.monotonic() - began < 0.9, "it did not answer when the indexes were opened, and rests"
        assert len(answer.results) == 6
        assert answer.notes[0] == f"{mute} did not answer within 1 s"
        source.members[-1].rests_until = 0.0
        began = time.monotonic()
        assert len(source.search(SearchRequest("a red square")).results) == 6
        assert 0.9 < time.monotonic() - began < 5


def test_one_that_trickles_is_cut_off(made):
    ended = threading.Event()

    def trickle(line):
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while True:
                line.sendall(b" ")
                time.sleep(0.05)
        except OSError:
            ended.set()
            raise

    with listening(trickle) as slow:
        with pytest.raises(UnansweredError, match=r"did not answer within 0\.5 s"):
            RemoteIndex(slow, 0.5).state()
        assert ended.wait(10), "its connection is closed"


def test_an_index_that_comes_back_answers_again(made, monkeypatch):
    port = int(nobody().rpartition(":")[2])
    with opened(made, f"{LOCAL}:{port}") as source:
        assert source.search(SearchRequest("a")).unanswered
        app = create_app(Searcher(made / "c"), ServerOptions())
        import uvicorn

        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        answer = source.search(SearchRequest("a"))
        server.should_exit = True
        thread.join()
        assert (answer.unanswered, len(answer.results)) == ([], 8)
        assert source.search(SearchRequest("a")).unanswered


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://", "no address of a tvr serve"),
        ("http://host:99999", "no address of a tvr serve"),
        ("http://host:port", "no address of a tvr serve"),
        ("ftp://host", "no address of a tvr serve"),
        ("http://secret@host/path", "no address of a tvr serve"),
        ("file:///etc/passwd", "no address of a tvr serve"),
        ("http://nowhere.invalid:1", "http://nowhere.invalid:1 cannot be reached"),
    ],
)
def test_a_wrong_address_is_said(address, said, capsys):
    assert main(["search", "a", "--index", address, "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "kind", "status", "said"),
    [
        (b"<html>hello</html>", "text/html", "200 OK", "no JSON"),
        (b"not here", "text/plain", "404 Not Found", "status 404"),
        (b"", "text/html", "302 Found", "status 302"),
        (b"[]", "application/json", "200 OK", "does not answer as a tvr serve"),
        (b'{"videos": NaN}', "application/json", "200 OK", "no JSON"),
        (b"[" * 100000, "application/json", "200 OK", "no JSON"),
    ],
)
def test_what_is_no_tvr_serve_is_said(content, kind, status, said):
    with (
        listening(replying(content, kind, status)) as address,
        pytest.raises(UnansweredError, match="as a tvr serve") as e,
    ):
        RemoteIndex(address, 5).state()
    assert said in str(e.value)
    with listening(lambda line: line.sendall(b"220 mail ready\r\n")) as address, pytest.raises(UnansweredError):
        RemoteIndex(address, 5).state()


def test_answers_of_another_server_are_checked(union):
    good = union.search(SearchRequest("a red square", evidence=True)).plain()

    def answered(**changes):
        plain = json.loads(json.dumps(good))
        plain["results"][0] |= changes
        with listening(replying(json.dumps(plain).encode())) as address:
            return RemoteIndex(address, 5).search(SearchRequest("a"))

    assert answered().results[0].score == good["results"][0]["score"]
    for changes in ({"id": "../../etc"}, {"score": float("nan")}, {"score": "high"}, {"best": [1]}, {"path": None}):
        with pytest.raises(UnansweredError, match="does not answer as a tvr serve"):
            answered(**changes)


def test_a_token_is_sent_to_its_own_server_and_asked_for(made):
    with (
        Searcher(made / "c") as searcher,
        serving(create_app(searcher, ServerOptions(), "secret")) as address,
    ):
        bare = address.rstrip("/")
        with pytest.raises(UnansweredError, match="asks for its token"):
            RemoteIndex(bare).state()
        with_token = RemoteIndex(bare.replace("//", "//secret@"))
        assert with_token.state()["videos"] == 2
        assert "secret" not in with_token.name


@pytest.fixture(scope="module")
def stranger(made, tmp_path_factory):
    """An index whose method has other weights."""
    folder = tmp_path_factory.mktemp("stranger")
    torch.manual_seed(7)
    encoder = {"width": 64, "image_size": 32, "text_layers": 1, "vision_layers": 1}
    module = CLIP4Clip(TinyClipEncoder(**encoder), words=12, frames=4)
    checkpoint = save_checkpoint(module, encoder, {"words": 12, "frames": 4}, folder / "method.ckpt")
    index([made / "videos" / "c"], folder / "index", [ScorerSource(str(checkpoint))], "exact", progress=False)
    return folder / "index"


def test_indexes_of_other_weights_are_refused_in_a_sentence(made, stranger, capsys):
    with pytest.raises(SearchError, match="was made with other weights than"):
        open_indexes([str(made / "a"), str(stranger)], 10.0, "cpu")
    for verb in (["search", "a"], ["serve", "--port", "0"]):
        assert main([*verb, "--index", str(made / "a"), "--index", str(stranger), "--device", "cpu"]) == 1
        error = capsys.readouterr().err
        assert "other weights" in error
        assert "serve it by itself" in error


def test_an_index_whose_weights_change_later_is_left_out(made, stranger):
    with (
        Searcher(made / "a") as one,
        Searcher(stranger) as other,
        Federation([LocalIndex(one, name="a"), LocalIndex(other, name="changed")], 10.0) as source,
    ):
        answer = source.search(SearchRequest("a red square"))
        assert {result.index for result in answer.results} == {"a"}
        assert answer.unanswered == ["changed"]
        assert "other weights than a" in answer.notes[0]


def test_servers_that_ask_one_another_come_to_an_end(made):
    with (
        opened(made, nobody(), names=("a",), patience=5.0) as source,
        serving(create_app(source, ServerOptions())) as own,
    ):
        circle = RemoteIndex(own.rstrip("/"), 5.0)
        source.members[-1].source.close()
        source.members[-1] = dataclasses.replace(source.members[-1], source=circle)
        answer = source.search(SearchRequest("a", top=50))
        assert {result.path for result in answer.results} == {"clip0.mp4", "clip1.mp4", "clip2.mp4"}


def test_servers_behind_servers(made, far, union):
    with opened(made, far, names=("b",)) as inner, serving(create_app(inner, ServerOptions())) as address:
        source, _ = open_indexes([str(made / "a"), address.rstrip("/")], 10.0, "cpu")
        with source:
            found, expected = (each.search(SearchRequest("a red square")) for each in (source, union))
            same(comparable(found), comparable(expected))
            client = TestClient(create_app(source, ServerOptions()), base_url=LOCAL)
            video = next(result for result in found.results if result.path == "clip7.mp4")
            content = (made / "videos" / "c" / "clip7.mp4").read_bytes()
            assert client.get(f"/api/videos/{video.id}/file").content == content


def test_what_several_cannot_serve_is_said(several, made, far, capsys):
    with pytest.raises(SearchError, match="balances the videos of one index"):
        several.search(SearchRequest("a", normalize="sinkhorn"))
    with pytest.raises(SearchError, match="given twice"):
        open_indexes([far, far], 10.0, "cpu")
    with pytest.raises(SearchError, match="--store says where"):
        open_indexes([str(made / "a"), far], 10.0, "cpu", "exact")
    with pytest.raises(SearchError, match="--patience is 0"):
        open_indexes([far], 0.0, "cpu")
    with pytest.raises(SearchError, match="The query is empty"):
        several.search(SearchRequest(""))
    with pytest.raises(UnansweredError, match="cannot be reached"):
        open_indexes([nobody(), nobody()], 10.0, "cpu")
    assert (
        main(["search", "a", "--index", str(made / "a"), "--index", far, "--rerank", "tcmgc", "--device", "cpu"]) == 1
    )
    assert "no scorer 'tcmgc'" in capsys.readouterr().err


def test_a_busy_index_is_named(made):
    with Searcher(made / "c") as searcher:
        app = create_app(searcher, ServerOptions(max_pending=1))
        with serving(app) as address, opened(made, address.rstrip("/")) as source:
            limit: ConcurrencyLimit = app.state.limit
            with limit.enter():
                answer = source.search(SearchRequest("a"))
            assert "is busy" in answer.notes[0]
            assert len(answer.results) == 6


def test_an_index_of_one_machine_loads_the_same_weights_once(several):
    one, other = (member.source.searcher for member in several.members[:2])
    assert one.scorers["gare"] is other.scorers["gare"]


def test_features_that_are_none_are_refused(several, union):
    clients = [TestClient(create_app(source, ServerOptions()), base_url=LOCAL) for source in (union, several)]
    for content in (b"nonsense", b"\0" * 100, b"\x02\0\0\0\0\0\0\0{}"):
        for client in clients:
            response = client.post("/api/examples", params={"kind": "features"}, content=content)
            assert (response.status_code, "features" in response.json()["detail"]) == (400, True)


def test_a_file_server_is_no_index(made, tmp_path):
    (tmp_path / "index.html").write_text("hello")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever).start()
        with opened(made, f"{LOCAL}:{server.server_port}") as source:
            answer = source.search(SearchRequest("a"))
        server.shutdown()
    assert len(answer.results) == 6
    assert "does not answer as a tvr serve" in answer.notes[0]


@pytest.mark.slow
def test_three_servers_of_which_one_is_killed(made, ended):
    """Processes as users start them: two servers, one more that asks them and has a folder, and a search."""
    command = [sys.executable, "-m", "tvr_lightning.cli"]

    def start(*indexes):
        options = [option for each in indexes for option in ("--index", str(each))]
        words = [*command, "serve", *options, "--port", "0"]
        server = ended(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True))
        line = server.stdout.readline()
        return server, line.split()[1].rstrip("/")

    def ask(address):
        with urllib.request.urlopen(f"{address}/api/search?query=a+red+square", timeout=60) as response:
            return json.load(response)

    one, first = start(made / "a")
    other, second = start(made / "b")
    server, address = start(first, second, made / "c")
    try:
        whole = ask(address)
        assert (len(whole["results"]), whole["unanswered"]) == (8, [])
        other.kill()
        other.wait()
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _: ask(address), range(16)))
        for answer in answers:
            assert {r["path"] for r in answer["results"]} == {f"clip{number}.mp4" for number in (0, 1, 2, 6, 7)}
            assert (answer["unanswered"], answer["notes"][0]) == (
                [second],
                f"{second} cannot be reached (Connection refused)",
            )
        words = [option for each in (first, second, made / "c") for option in ("--index", str(each))]
        said = subprocess.run([*command, "search", "a red square", *words], capture_output=True, text=True, check=True)
        assert f"note: {second} cannot be reached" in said.stdout
        assert "  5. " in said.stdout
    finally:
        for process in (one, other, server):
            process.terminate()
            process.wait(60)
            process.stdout.close()
