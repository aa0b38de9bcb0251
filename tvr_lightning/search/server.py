"""A page and an API that search an index; no path comes from a client, only ids that the index knows."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

from tvr_lightning._version import __version__
from tvr_lightning.media.opening import MediaError
from tvr_lightning.media.picture import PictureError
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import BusyError, GivenUpError, SearchError, UnknownVideoError, optional
from tvr_lightning.search.examples import Examples
from tvr_lightning.search.files import inside, resolve_roots
from tvr_lightning.search.limits import (
    COOKIE,
    ConcurrencyLimit,
    OverloadedError,
    TooLargeError,
    TooManyError,
    TooSlowError,
    is_local,
    save_upload,
    shows_token,
    sweep_uploads,
    upload_folder,
    while_wanted,
)
from tvr_lightning.search.local import LocalIndex
from tvr_lightning.search.ranking import Example
from tvr_lightning.search.results import Normalize
from tvr_lightning.search.source import ExampleKind, SearchRequest
from tvr_lightning.search.texts import GivenUp

optional("fastapi", "tvr serve")
from fastapi import FastAPI, Query, Request  # noqa: E402
from fastapi import Path as InPath  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402

POLICY = "default-src 'self'; media-src 'self' blob:; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
LONGEST_QUERY = 2000
MOST_RESULTS = 100
MOST_CANDIDATES = 1024
RETRY_AFTER = 5
"""Seconds after which a client that got 503 may ask again."""
OPEN_ROUTES = ("/health",)
"""Routes that need no token."""
COSTLY_ROUTES = ("/search", "/search/video", "/search/picture", "/similar", "/texts")
"""How the addresses end that compute something."""
MEDIA_TYPES = {".mp4": "video/mp4", ".m4v": "video/mp4", ".webm": "video/webm", ".mov": "video/quicktime"}
UNKNOWN_TYPE = "application/octet-stream"
MEDIA_TYPES |= {".mkv": "video/x-matroska", ".ogv": "video/ogg", ".avi": "video/x-msvideo"}

T = TypeVar("T")
ID = "^[0-9a-f]{16}$"
Id = Annotated[str, InPath(pattern=ID, description="ID of a video in the index")]
Top = Annotated[int, Query(ge=1, le=MOST_RESULTS, description="number of results")]
Folder = Annotated[str | None, Query(max_length=LONGEST_QUERY, description="folder inside an indexed one")]
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request cannot be served; `detail` gives the reason"},
    401: {"description": "the token is missing or wrong"},
    403: {"description": "the request comes from a page of another origin"},
    404: {"description": "no such video"},
    422: {"description": "a value is out of range, or the video cannot be decoded"},
    429: {"description": "too many searches at once"},
}


@dataclass(frozen=True)
class ServerOptions:
    """How an index is served.

    Attributes:
        host: address to bind to.
        port: to listen on.
        token: what clients must show; None asks TVR_SEARCH_TOKEN, and beyond this machine draws one.
        most_upload: bytes of an example clip.
        max_pending: searches and texts that may run and wait at once, and uploads that may be under way.
        upload_seconds: how long an upload may take.
        videos: files and folders whose videos may be handed out; none for those that this user indexed here.
        max_decoding: uploads that are decoded and encoded at once.
        max_undecoded: uploads that may wait for it; more are refused.

    Raises:
        SearchError: a number out of range, or videos that are not there.
    """

    host: str = "127.0.0.1"
    port: int = 8321
    token: str | None = None
    most_upload: int = 64 * 2**20
    max_pending: int = 16
    upload_seconds: float = 120.0
    videos: tuple[Path, ...] = ()
    max_decoding: int = 2
    max_undecoded: int = 4

    def __post_init__(self) -> None:
        if self.max_decoding < 1 or self.max_undecoded < 0:
            raise SearchError("max_decoding must be at least 1, and max_undecoded at least 0")
        if not 0 <= self.port <= 65535 or self.most_upload < 1 or self.max_pending < 1:
            raise SearchError("port must be between 0 and 65535, and max_upload_mib and max_pending at least 1")
        if self.videos:
            resolve_roots(self.videos)

    def required_token(self) -> str | None:
        """Return what clients must show; None where anyone on this machine may ask."""
        token = self.token or os.environ.get("TVR_SEARCH_TOKEN")
        return token or (None if is_local(self.host) else secrets.token_urlsafe(24))


def create_app(searched: Searcher, options: ServerOptions, token: str | None = None) -> FastAPI:
    """Make the application.

    Args:
        searched: answers the queries.
        options: limits.
        token: what clients must show; None for nothing.
    """
    source = LocalIndex(searched, options.videos)
    app = FastAPI(title="tvr search", version=__version__, docs_url=None, redoc_url=None)
    app.state.limit = ConcurrencyLimit(options.max_pending)
    app.state.decoding = ConcurrencyLimit(options.max_decoding + options.max_undecoded, "uploads", OverloadedError)
    sweep_uploads()
    _guard(app, token, local=is_local(options.host))
    _explain(app)
    searches = _Searches(app, options)
    _add_search(app, source, options, searches)
    _add_videos(app, source, searches)
    _add_state(app, source)
    _add_page(app)
    return app


def serve(searched: Searcher, options: ServerOptions) -> None:
    """Serve until interrupted; requests under way are finished first.

    Args:
        searched: the index.
        options: where and how.

    Raises:
        SearchError: the port cannot be had.
    """
    uvicorn = optional("uvicorn", "tvr serve")
    token, source = options.required_token(), LocalIndex(searched, options.videos)
    app = create_app(searched, options, token)
    shown = f"?token={token}" if token else ""
    kept = [str(root) for root in source.searcher.roots if not inside(root, source.handed_out)]
    if kept:
        print(
            f"Not served: the videos in {', '.join(kept)}, which only the index names. If you want to serve them, add "
            "--videos FOLDER",
            file=sys.stderr,
        )
    settings = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=10,
        server_header=False,
    )
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        reason = error.strerror or error
        raise SearchError(
            f"Cannot listen on {options.host}:{options.port} ({reason}). Choose another --port."
        ) from error
    port = listening.getsockname()[1]
    print(f"Open http://{options.host}:{port}/{shown}  (Ctrl-C to stop)", flush=True)
    with listening:
        uvicorn.Server(settings).run(sockets=[listening])


def _guard(app: FastAPI, token: str | None, local: bool) -> None:
    """Check every request before anything else sees it."""

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        refusal = _refusal(request, token, local)
        response = refusal or await call_next(request)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response


def _refusal(request: Request, token: str | None, local: bool) -> Response | None:
    host = request.url.hostname or ""
    if local and not is_local(host):
        # A page elsewhere may let its own name point here; its scripts must not read an index without a token.
        return JSONResponse({"detail": f"served on this machine only, not as {host[:100]}"}, 400)
    if _foreign(request):
        return JSONResponse(
            {"detail": "Requests from pages of other origins are rejected. Open this server's own page."}, 403
        )
    costly = request.method == "POST" or request.url.path.endswith(COSTLY_ROUTES)
    if costly and request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return JSONResponse(
            {"detail": "Searches and uploads are accepted only from this server's own page or from a program."}, 403
        )
    names = [name for name, _ in request.query_params.multi_items()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return JSONResponse({"detail": f"{twice[:100]} is given more than once. Give it once."}, 400)
    if token is None or request.url.path in OPEN_ROUTES:
        return None
    if request.url.path == "/" and shows_token(token, None, request.query_params.get("token")):
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response
    if shows_token(token, request.headers.get("authorization"), request.cookies.get(COOKIE)):
        return None
    detail = "Send the token as Authorization: Bearer TOKEN, or open /?token=TOKEN once."
    return JSONResponse({"detail": detail}, 401, {"WWW-Authenticate": "Bearer"})


def _foreign(request: Request) -> bool:
    """Whether a page of another origin asks, by what an older browser says that sends no Sec-Fetch-Site.

    Hosts are compared without their schemes, since a proxy may speak TLS to the browser alone.
    """
    origin = request.headers.get("origin")
    if origin is None or "sec-fetch-site" in request.headers:
        return False
    return origin.partition("://")[2].lower() != request.headers.get("host", "").lower()


def _explain(app: FastAPI) -> None:
    """Turn errors that a client can mend into a status and a sentence; no path of this machine and no stack is told."""
    statuses: dict[type[Exception], int] = {
        UnknownVideoError: 404,
        TooLargeError: 413,
        TooManyError: 429,
        TooSlowError: 408,
        OverloadedError: 503,
        BusyError: 503,
        GivenUpError: 499,  # no client reads it
        SearchError: 400,
    }

    async def mendable(_: Request, error: Exception) -> Response:
        status = next(s for kind, s in statuses.items() if isinstance(error, kind))
        headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
        return JSONResponse({"detail": str(error)}, status, headers)

    async def undecodable(_: Request, error: Exception) -> Response:
        assert isinstance(error, MediaError)
        what = "picture" if isinstance(error, PictureError) else "clip"
        return JSONResponse({"detail": f"the {what} {error.reason}"}, 422)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [f"{'.'.join(str(part) for part in item['loc'][1:])}: {item['msg']}" for item in error.errors()]
        return JSONResponse({"detail": "; ".join(found)}, 422)

    for kind in statuses:
        app.add_exception_handler(kind, mendable)

    async def gone(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": "the upload was interrupted"}, 400)

    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(MediaError, undecodable)
    app.add_exception_handler(RequestValidationError, invalid)


class _Searches:
    """Runs what clients ask for: so much at once and no more, in threads that nothing else waits for.

    Args:
        app: counts how many run.
        options: how many.
    """

    def __init__(self, app: FastAPI, options: ServerOptions) -> None:
        self.limit: ConcurrencyLimit = app.state.limit
        self._pool = ThreadPoolExecutor(options.max_pending, "tvr-search")

    async def run(self, request: Request, work: Callable[[GivenUp], T]) -> T:
        """Run work while the client is there.

        Raises:
            TooManyError: no place is free.
            GivenUpError: the client is gone.
        """
        with self.limit.enter():
            return await while_wanted(request.receive, self._pool, work)

    async def search(self, request: Request, source: LocalIndex, asked: Callable[[], SearchRequest]) -> dict[str, Any]:
        """Run a search and return its answer in plain values."""
        return await self.run(request, lambda _: source.search(asked()).plain())


def _add_search(app: FastAPI, source: LocalIndex, options: ServerOptions, searches: _Searches) -> None:
    examples = Examples()
    uploads = ConcurrencyLimit(options.max_pending, "uploads")  # each takes room on the disk before it is searched for
    decoding: ConcurrencyLimit = app.state.decoding  # each takes memory and a processor
    decoders = ThreadPoolExecutor(options.max_decoding, "tvr-decode")

    def known(name: str) -> Example:
        return examples.get(name) or source.example(name)

    @app.get("/api/search", responses=REFUSALS)
    async def search(
        request: Request,
        query: Annotated[str, Query(max_length=LONGEST_QUERY, description="description of the videos to find")] = "",
        like: Annotated[str | None, Query(pattern=ID, description="ID of a video or an uploaded example")] = None,
        top: Top = 10,
        rerank: Annotated[str | None, Query(max_length=100, description="scorer of the second stage, or none")] = None,
        candidates: Annotated[int, Query(ge=1, le=MOST_CANDIDATES)] = 256,
        normalize: Normalize = "none",
        folder: Folder = None,
        threshold: Annotated[float | None, Query(ge=0, le=1, description="minimum relevance of the results")] = None,
    ) -> dict[str, Any]:
        """Find videos by words, by examples, or by both."""

        def asked() -> SearchRequest:
            example = None if like is None else known(like)
            return SearchRequest(query, top, rerank, candidates, normalize, folder, threshold, example)

        return await searches.search(request, source, asked)

    @app.get("/api/videos/{video}/similar", responses=REFUSALS)
    async def similar(
        request: Request,
        video: Id,
        top: Top = 10,
        folder: Folder = None,
    ) -> dict[str, Any]:
        """Find videos that look like one of the index."""
        return await searches.search(
            request, source, lambda: SearchRequest(top=top, folder=folder, like=source.example(video))
        )

    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    body = {"required": True, "content": content}
    too_large: dict[int | str, dict[str, Any]] = {
        408: {"description": "the upload took too long"},
        413: {"description": "the clip is too large"},
        503: {"description": "too many uploads are pending; retry after the time in Retry-After"},
    }

    async def read_upload(request: Request, kind: ExampleKind, name: str) -> Example:
        """Take the body in and make an example of it; nothing stays on the disk."""
        decoding.require_place()  # before the body comes for nothing
        with upload_folder() as folder:
            clip = folder / "example"
            with uploads.enter():
                promised = request.headers.get("content-length")
                await save_upload(request.stream(), clip, promised, options.most_upload, options.upload_seconds)
            with decoding.enter():
                read = functools.partial(source.read, clip, kind, name)
                return await while_wanted(request.receive, decoders, lambda _: read())

    @app.post("/api/examples", responses=REFUSALS | too_large, openapi_extra={"requestBody": body})
    async def keep_example(
        request: Request,
        kind: Annotated[ExampleKind, Query(description="type of the body")] = "clip",
        name: Annotated[str, Query(max_length=200, description="name of the upload")] = "",
    ) -> dict[str, str]:
        """Take a clip or a picture as an example for searches to come, until others have taken its place."""
        example = await read_upload(request, kind, name or f"example {kind}")
        return {"id": examples.keep(example), "name": example.name}

    @app.post("/api/search/video", responses=REFUSALS | too_large, openapi_extra={"requestBody": body})
    async def by_clip(
        request: Request,
        top: Top = 10,
        folder: Folder = None,
    ) -> dict[str, Any]:
        """Find videos that look like the clip in the body."""
        example = await read_upload(request, "clip", "example clip")
        return await searches.search(request, source, lambda: SearchRequest(top=top, folder=folder, like=example))

    @app.post("/api/search/picture", responses=REFUSALS | too_large, openapi_extra={"requestBody": body})
    async def by_picture(
        request: Request,
        top: Top = 10,
        folder: Folder = None,
    ) -> dict[str, Any]:
        """Find videos that look like the picture in the body."""
        example = await read_upload(request, "picture", "example picture")
        return await searches.search(request, source, lambda: SearchRequest(top=top, folder=folder, like=example))


def _add_videos(app: FastAPI, source: LocalIndex, searches: _Searches) -> None:
    @app.get("/api/videos", responses=REFUSALS)
    def library(
        top: Annotated[int, Query(ge=1, le=MOST_RESULTS, description="number of videos")] = 24,
        after: Annotated[int, Query(ge=0, le=10**9, description="number of videos to skip")] = 0,
        folder: Folder = None,
    ) -> dict[str, Any]:
        """List videos, the latest first."""
        return source.library(folder, top, after)

    @app.get("/api/videos/{video}/about", responses=REFUSALS)
    def about(video: Id) -> dict[str, Any]:
        """Say what is known of one video, and which of its moments have pictures."""
        return source.about(video)

    @app.get("/api/videos/{video}/file", responses=REFUSALS, response_class=FileResponse)
    def file(video: Id) -> Response:
        """Return the video itself, or the range of bytes that is asked for."""
        found = source.file(video)
        return FileResponse(found, media_type=MEDIA_TYPES.get(found.suffix.lower(), UNKNOWN_TYPE))

    @app.get("/api/videos/{video}/picture", responses=REFUSALS, response_class=Response)
    def picture(video: Id, time: Annotated[float, Query(ge=0, le=1e7, description="seconds")] = 0.0) -> Response:
        """Return the indexed frame nearest to a time as JPEG."""
        return Response(source.picture(video, time), media_type="image/jpeg")

    @app.get("/api/videos/{video}/texts", responses=REFUSALS)
    async def texts(request: Request, video: Id, top: Top = 10) -> list[dict[str, Any]]:
        """Return the queries of the index's bank, or without one the captions, that fit a video, best first."""
        return await searches.run(request, lambda given_up: source.texts(video, top, given_up))


def _add_state(app: FastAPI, source: LocalIndex) -> None:
    @app.get("/api/index")
    def index() -> dict[str, Any]:
        """Say what is indexed and which scorers there are."""
        return source.state()

    @app.get("/health")
    def health() -> dict[str, str]:
        """Say that requests are answered."""
        source.ready()
        return {"status": "ok"}


def _add_page(app: FastAPI) -> None:
    files = {
        "/": ("index.html", "text/html"),
        "/app.js": ("app.js", "text/javascript"),
        "/player.js": ("player.js", "text/javascript"),
        "/app.css": ("app.css", "text/css"),
    }
    for address, (name, kind) in files.items():
        content = (resources.files("tvr_lightning.search") / "page" / name).read_text(encoding="utf-8")
        app.add_api_route(address, _page(content, kind), include_in_schema=False)


def _page(content: str, kind: str) -> Callable[[], Response]:
    def page() -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return page
