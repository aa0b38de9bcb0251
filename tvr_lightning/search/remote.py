"""An index that another `tvr serve` has open, asked over HTTP; nothing that it says is taken on trust."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

from typing_extensions import TypedDict  # pydantic accepts the built-in one only from Python 3.12

from tvr_lightning._version import __version__
from tvr_lightning.search.errors import SearchError, UnknownVideoError, optional
from tvr_lightning.search.examples import pack, unpack
from tvr_lightning.search.filters import Filter
from tvr_lightning.search.hops import HOPS, hops
from tvr_lightning.search.ranking import Example
from tvr_lightning.search.results import Answer
from tvr_lightning.search.source import ExampleKind, Passed, SearchRequest, SlowError, Source, UnansweredError
from tvr_lightning.search.texts import GivenUp, never

optional("pydantic", "asking another tvr serve")
from pydantic import Field, TypeAdapter, ValidationError  # noqa: E402

ID = r"[0-9a-f]{16,48}"
"""What ids of videos look like, on servers that ask others as well."""
PATIENCE = 10.0
"""Seconds that another server may take to answer."""
TO_READ = 120.0
"""Seconds that it may take to read an example."""
MOST_BYTES = 64 * 2**20
"""Of an answer; files of videos apart."""
BLOCK = 2**16
PASSED = ("content-type", "content-length", "content-range", "accept-ranges", "etag", "last-modified")
"""Headers of a file that players read."""


class _Video(TypedDict):
    id: Annotated[str, Field(pattern=f"^{ID}$")]
    path: str
    duration: float
    width: int
    height: int
    index: str


class _About(_Video):
    captions: list[str]
    pictures: list[float]


class _Library(TypedDict):
    videos: list[_Video]
    count: int


class _Folder(TypedDict):
    folder: str
    count: int


class _Length(TypedDict):
    shortest: float
    longest: float | None
    count: int


class _Facets(TypedDict):
    folders: list[_Folder]
    lengths: list[_Length]


class _Part(TypedDict):
    name: str
    videos: int
    problem: str


class _State(TypedDict):
    videos: int
    scorers: list[str]
    weights: dict[str, str]
    normalize: list[str]
    captioned: int
    examples: list[str]
    skipped: int
    store: str
    indexes: list[_Part]


class _Text(TypedDict):
    text: str
    score: float


class _Kept(TypedDict):
    id: Annotated[str, Field(pattern=f"^{ID}$")]
    name: str


class RemoteIndex(Source):
    """What a `tvr serve` elsewhere answers from.

    Args:
        address: http or https, host and port; a token that it asks for stands before the host, as in
            http://TOKEN@host:8321.
        patience: seconds that an answer may take.

    Raises:
        SearchError: the address is none.
    """

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError as error:
            raise SearchError(f"--index {_bare(address)}: no address of a tvr serve ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise SearchError(
                f"--index {_bare(address)}: no address of a tvr serve; write http://HOST:PORT, with no path after it"
            )
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._token, self.patience = parts.username, patience
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.name = f"{parts.scheme}://{host}{f':{port}' if port else ''}"

    def close(self) -> None:
        """Nothing is held open."""

    def ready(self) -> None:
        """Check that the server answers.

        Raises:
            UnansweredError: it does not.
        """
        self._body("GET", "/health")

    def count(self) -> int:
        """Return 0: the other server counts its videos itself."""
        return 0

    def state(self) -> dict[str, Any]:
        """Return what is indexed and which scorers there are."""
        return dict(self._read("/api/index", _State))

    def search(self, asked: SearchRequest) -> Answer:
        """Answer a search.

        Raises:
            UnansweredError: the server does not answer, or not as a tvr serve does.
            SearchError: it refuses the request; says why.
        """
        values: list[tuple[str, Any]] = [
            ("query", asked.query),
            ("without", asked.without),
            ("top", asked.top),
            ("candidates", asked.candidates),
            ("normalize", asked.normalize),
            ("evidence", str(asked.evidence).lower()),
            *self._filter(asked.only),
        ]
        values += [("like", self._id(example)) for example in asked.like]
        values += [("unlike", self._id(example)) for example in asked.unlike]
        values += [
            (name, value)
            for name, value in (("rerank", asked.rerank), ("threshold", asked.threshold))
            if value is not None
        ]
        answer: Answer = self._read(f"/api/search?{urlencode(values)}", Answer)
        if not all(re.fullmatch(ID, result.id) for result in answer.results):
            raise self._strange("ids of videos")
        return answer

    def read(self, path: Path, kind: ExampleKind, name: str) -> Example:
        """Have a file read as an example.

        Raises:
            UnansweredError: the server does not answer, or not as a tvr serve does.
            SearchError: it cannot read the file; says why.
        """
        values = urlencode({"kind": kind, "name": name[:200]})
        kept = self._read(f"/api/examples?{values}", _Kept, path.read_bytes(), TO_READ)
        return unpack(self._body("GET", f"/api/features/{kept['id']}"), name)

    def example(self, video: str) -> Example:
        """Return a video as an example.

        Raises:
            UnansweredError: the server does not answer, or not as a tvr serve does.
            UnknownVideoError: no such video.
        """
        name = Path(self.about(video)["path"]).name
        example = unpack(self._body("GET", f"/api/features/{quote(video)}"), name)
        return Example(name, example.features, video)

    def library(self, only: Filter, top: int, after: int) -> dict[str, Any]:
        """List videos."""
        values = urlencode([("top", top), ("after", after), *self._filter(only)])
        return dict(self._read(f"/api/videos?{values}", _Library))

    def facets(self) -> dict[str, Any]:
        """Count videos by folder and by length."""
        return dict(self._read("/api/facets", _Facets))

    def about(self, video: str) -> dict[str, Any]:
        """Say what is known of one video.

        Raises:
            UnansweredError: the server does not answer, or not as a tvr serve does.
            UnknownVideoError: no such video.
        """
        return dict(self._read(f"/api/videos/{quote(video)}/about", _About))

    def file(self, video: str, wanted: Mapping[str, str]) -> Passed:
        """Return the video itself as it comes.

        Raises:
            UnansweredError: the server does not answer, or not as a tvr serve does.
            UnknownVideoError: no such video.
            SearchError: it may not be handed out.
        """
        with contextlib.ExitStack() as undo:
            response = undo.enter_context(self._asked("GET", f"/api/videos/{quote(video)}/file", None, wanted))
            if response.status not in (200, 206, 416):
                raise self._refusal(response.status, response.read(MOST_BYTES))
            headers = {name: value for name in PASSED if (value := response.headers.get(name)) is not None}
            if not headers.get("content-length", "0").isdigit():
                raise self._strange("Content-Length")
            return Passed(response.status, headers, self._chunks(response, undo.pop_all()))
        raise AssertionError("the block above returns or raises")

    def picture(self, video: str, time: float) -> bytes:
        """Return the indexed frame nearest to a time as JPEG.

        Raises:
            UnansweredError: the server does not answer, or not as a tvr serve does.
            UnknownVideoError: no such video, or none of its pictures.
        """
        return self._body("GET", f"/api/videos/{quote(video)}/picture?{urlencode({'time': time})}")

    def texts(self, video: str, top: int, given_up: GivenUp = never) -> list[dict[str, Any]]:
        """Return the texts that fit a video, best first.

        Raises:
            UnansweredError: the server does not answer, or not as a tvr serve does.
            SearchError: there are no texts.
            UnknownVideoError: no such video.
        """
        address = f"/api/videos/{quote(video)}/texts?{urlencode({'top': top})}"
        return [dict(each) for each in self._read(address, list[_Text], seconds=TO_READ)]

    def _id(self, example: Example) -> str:
        """Return what the server calls an example: its own video, or one that it keeps now."""
        if example.video is not None:
            return example.video
        values = urlencode({"kind": "features", "name": example.name[:200]})
        return str(self._read(f"/api/examples?{values}", _Kept, pack(example))["id"])

    def _filter(self, only: Filter | None) -> list[tuple[str, Any]]:
        given = only or Filter()
        values = [(name, getattr(given, name)) for name in ("shortest", "longest", "path", "caption", "folder")]
        return [(name, value) for name, value in values if value is not None]

    def _read(self, address: str, kind: Any, body: bytes | None = None, seconds: float | None = None) -> Any:
        """Return an answer in JSON, checked to be of a kind; with a body it is posted."""
        content = self._body("GET" if body is None else "POST", address, body, seconds)
        try:
            plain = json.loads(content, parse_float=_finite, parse_constant=_finite)
            return TypeAdapter(kind).validate_python(plain)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise self._strange(where) from error
        except (ValueError, RecursionError) as error:
            raise self._strange("no JSON") from error

    def _body(self, method: str, address: str, body: bytes | None = None, seconds: float | None = None) -> bytes:
        with self._asked(method, address, body, seconds=seconds) as response:
            content = response.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise UnansweredError(f"{self.name} answers with more than {MOST_BYTES // 2**20} MiB")
            if response.status != 200:
                raise self._refusal(response.status, content)
            return content

    @contextlib.contextmanager
    def _asked(
        self,
        method: str,
        address: str,
        body: bytes | None = None,
        more: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Give the answer to a request; the connection is cut when the time for all of it is up, whatever trickles in.

        What is read slowly by the client, a file, has the time for every block instead.
        """
        seconds = seconds or self.patience
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        headers = {HOPS: str(hops.get() + 1), **(more or {})}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        with contextlib.closing(kind(self._host, self._port, timeout=seconds)) as connection:
            late = threading.Event()
            try:
                connection.connect()
                line = connection.sock

                def cut() -> None:
                    late.set()
                    with contextlib.suppress(OSError):
                        line.shutdown(socket.SHUT_RDWR)

                watch = threading.Timer(seconds, cut)
                watch.daemon = True
                watch.start()
                try:
                    connection.request(method, address, body, headers)
                    response = connection.getresponse()
                    if more is not None:
                        watch.cancel()
                    with response:
                        yield response
                    if late.is_set():
                        raise TimeoutError
                finally:
                    watch.cancel()
            except (OSError, http.client.HTTPException) as error:
                raise self._silence(TimeoutError() if late.is_set() else error, seconds) from error

    def _chunks(self, response: http.client.HTTPResponse, undo: contextlib.ExitStack) -> Iterator[bytes]:
        """Give a file block by block, and let go of the connection at its end, or once nobody reads on."""
        with undo:
            while block := response.read1(BLOCK):
                yield block

    def _silence(self, error: Exception, seconds: float | None) -> UnansweredError:
        if isinstance(error, TimeoutError):
            return SlowError(f"{self.name} did not answer within {seconds or self.patience:g} s")
        if isinstance(error, (http.client.HTTPException, ValueError)):
            return self._strange(type(error).__name__)
        reason = error.strerror if isinstance(error, OSError) else None
        return UnansweredError(f"{self.name} cannot be reached ({reason or error})")

    def _strange(self, what: str) -> UnansweredError:
        return UnansweredError(
            f"{self.name} does not answer as a tvr serve of version {__version__} does ({what}); look at the address"
        )

    def _refusal(self, status: int, content: bytes) -> SearchError:
        """Return what the server says of a request that it does not answer."""
        if status == 401:
            return UnansweredError(f"{self.name} asks for its token; write it as --index http://TOKEN@HOST:PORT")
        try:
            detail = str(json.loads(content)["detail"])[:500]
        except (ValueError, KeyError, TypeError):
            return self._strange(f"status {status}")
        if status in (429, 503):
            return UnansweredError(f"{self.name} is busy: {detail}")
        if status == 404:
            return UnknownVideoError(detail)
        return SearchError(f"{self.name}: {detail}") if status < 500 else UnansweredError(f"{self.name}: {detail}")


def is_address(index: str) -> bool:
    """Whether an index is named by an address rather than by its folder."""
    return "://" in index


def _bare(address: str) -> str:
    """Return an address without its token."""
    return re.sub(r"//[^/@]*@", "//", address)


def _finite(text: str) -> float:
    """Return a number.

    Raises:
        ValueError: it is none, or infinite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value
