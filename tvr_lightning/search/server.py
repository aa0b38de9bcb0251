"""A page and an API that search an index; no path comes from a client, only ids that the index knows."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from tvr_lightning._version import __version__
from tvr_lightning.media.opening import MediaError
from tvr_lightning.media.picture import PictureError
from tvr_lightning.search.catalog import VideoRow
from tvr_lightning.search.engine import CANDIDATES, ExampleKind, Searcher
from tvr_lightning.search.errors import BusyError, GivenUpError, SearchError, UnknownVideoError, optional
from tvr_lightning.search.files import inside, resolve_roots
from tvr_lightning.search.limits import (
    COOKIE,
    RETRY_AFTER,
    ConcurrencyLimit,
    is_local,
    save_upload,
    shows_token,
    sweep_uploads,
    upload_folder,
    while_wanted,
)
from tvr_lightning.search.places import handed_out, remembered
from tvr_lightning.search.ranking import Example
from tvr_lightning.search.results import Normalize
from tvr_lightning.search.texts import GivenUp

optional("fastapi", "tvr serve")
from fastapi import FastAPI, Query, Request  # noqa: E402
from fastapi import Path as InPath  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402

POLICY = "default-src 'self'; media-src 'self' blob:; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
LONGEST_QUERY = 2000
MOST_RESULTS = 100
MOST_CANDIDATES = 1024
EXAMPLES_KEPT = 256
"""Uploaded examples whose features stay in memory."""
PREVIEWS = 12
"""Thumbnails of a video that are shown in turn."""
OPEN_ROUTES = ("/health",)
"""Routes that need no token."""
COSTLY_ROUTES = ("/search", "/texts")
"""Ends of the addresses that compute something."""
MEDIA_TYPES = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".webm": "video/webm",
    ".mov": "video/quicktime",
    ".mkv": "video/x-matroska",
    ".ogv": "video/ogg",
    ".avi": "video/x-msvideo",
}
UNKNOWN_TYPE = "application/octet-stream"
ID = "^[0-9a-f]{16}$"
Id = Annotated[str, InPath(pattern=ID, description="ID of a video in the index")]
Top = Annotated[int, Query(ge=1, le=MOST_RESULTS, description="number of results")]
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request cannot be served; `detail` gives the reason"},
    401: {"description": "the token is missing or wrong"},
    403: {"description": "the request comes from a page of another origin"},
    404: {"description": "no such video"},
    422: {"description": "a value is out of range, or the video cannot be decoded"},
    429: {"description": "too many searches at once"},
}
UPLOAD_REFUSALS: dict[int | str, dict[str, Any]] = {
    408: {"description": "the upload took too long"},
    413: {"description": "the clip is too large"},
    503: {"description": "too many uploads are pending; retry after the time in Retry-After"},
}


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        host: Address to bind to.
        port: Port to listen on.
        token: Token that clients send, TVR_SEARCH_TOKEN by default; generated if other machines can connect.
        most_upload: Maximum size of an upload in bytes.
        max_pending: Maximum number of running and pending searches, and of uploads in progress.
        upload_seconds: Maximum duration of an upload in seconds.
        videos: Files and folders whose videos may be served, by default those that this user indexed here.
        max_decoding: Maximum number of uploads that are decoded at the same time.
        max_undecoded: Maximum number of uploads that wait for decoding.

    Raises:
        SearchError: A number is out of range, or `videos` do not exist.
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
        """Return the token that clients must send; None if only this machine can connect."""
        token = self.token or os.environ.get("TVR_SEARCH_TOKEN")
        return token or (None if is_local(self.host) else secrets.token_urlsafe(24))


def create_app(searcher: Searcher, options: ServerOptions, token: str | None = None) -> FastAPI:
    """Make the application; with a token, clients must show it."""
    app = FastAPI(title="tvr search", version=__version__, docs_url=None, redoc_url=None)
    app.state.limit = ConcurrencyLimit(options.max_pending)
    app.state.decoding = ConcurrencyLimit(options.max_decoding + options.max_undecoded, "uploads", 503)
    sweep_uploads()

    def shown(path: str | Path) -> str:
        """Return a path relative to its indexed folder; clients learn nothing else about this machine."""
        path = Path(path)
        root = next((root for root in searcher.catalog.roots if root in path.parents), path.parent)
        return path.relative_to(root).as_posix()

    _guard(app, token, local=is_local(options.host))
    _explain(app)
    _add_search(app, searcher, options, shown)
    _add_videos(app, searcher, options, shown)
    _add_page(app)
    return app


def serve(searcher: Searcher, options: ServerOptions) -> None:
    """Serve until interrupted; current requests are finished first.

    Raises:
        SearchError: The port cannot be used.
    """
    uvicorn = optional("uvicorn", "tvr serve")
    token = options.required_token()
    app = create_app(searcher, options, token)
    shown = f"?token={token}" if token else ""
    kept = [str(root) for root in searcher.catalog.roots if not inside(root, _served(searcher, options))]
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
    """Return errors as a status and one sentence, without server paths and stack traces."""
    statuses: dict[type[Exception], int] = {
        UnknownVideoError: 404,
        BusyError: 503,
        GivenUpError: 499,  # no client reads it
        SearchError: 400,
    }

    async def refused(_: Request, error: Exception) -> Response:
        status = next(s for kind, s in statuses.items() if isinstance(error, kind))
        headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
        return JSONResponse({"detail": str(error)}, status, headers)

    async def undecodable(_: Request, error: Exception) -> Response:
        assert isinstance(error, MediaError)
        what = "image" if isinstance(error, PictureError) else "clip"
        return JSONResponse({"detail": f"the {what} {error.reason}"}, 422)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [f"{'.'.join(str(part) for part in item['loc'][1:])}: {item['msg']}" for item in error.errors()]
        return JSONResponse({"detail": "; ".join(found)}, 422)

    for kind in statuses:
        app.add_exception_handler(kind, refused)

    async def gone(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": "the upload was interrupted"}, 400)

    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(MediaError, undecodable)
    app.add_exception_handler(RequestValidationError, invalid)


class SearchQuery(BaseModel, extra="forbid"):
    """Parameters of a search."""

    query: str = Field("", max_length=LONGEST_QUERY, description="description of the videos to find")
    like: str | None = Field(None, pattern=ID, description="ID of a video or of an uploaded example")
    top: int = Field(10, ge=1, le=MOST_RESULTS, description="number of results")
    rerank: str | None = Field(None, max_length=100, description="scorer of the second stage, or none")
    candidates: int = Field(CANDIDATES, ge=1, le=MOST_CANDIDATES, description="number of candidates")
    normalize: Normalize = "none"
    folder: str | None = Field(None, max_length=LONGEST_QUERY, description="folder inside an indexed one")
    threshold: float | None = Field(None, ge=0, le=1, description="minimum relevance of the results")


class LibraryQuery(BaseModel, extra="forbid"):
    """Parameters of the list of videos."""

    folder: str | None = Field(None, max_length=LONGEST_QUERY, description="folder inside an indexed one")
    top: int = Field(24, ge=1, le=MOST_RESULTS, description="number of videos")
    after: int = Field(0, ge=0, le=10**9, description="number of videos to skip")


def _add_search(app: FastAPI, searcher: Searcher, options: ServerOptions, shown: Callable[[str | Path], str]) -> None:
    examples: OrderedDict[str, Example] = OrderedDict()
    searches = ThreadPoolExecutor(options.max_pending, "tvr-search")
    decoders = ThreadPoolExecutor(options.max_decoding, "tvr-decode")
    uploads = ConcurrencyLimit(options.max_pending, "uploads")  # each takes disk space
    limit: ConcurrencyLimit = app.state.limit
    decoding: ConcurrencyLimit = app.state.decoding  # each takes memory and a processor

    @app.get("/api/search", responses=REFUSALS)
    async def search(request: Request, asked: Annotated[SearchQuery, Query()]) -> dict[str, Any]:
        """Find videos by text, by an example, or by both."""

        def work(_: GivenUp) -> dict[str, Any]:
            example = examples.get(asked.like or "")
            if asked.like and example is None:
                example = searcher.example(asked.like)
            answer = searcher.search(**asked.model_dump(exclude={"like"}), like=example).plain()
            for result in answer["results"]:
                result["path"] = shown(result["path"])
            return answer

        with limit.enter():
            return await while_wanted(request.receive, searches, work)

    @app.get("/api/videos/{video}/texts", responses=REFUSALS)
    async def texts(request: Request, video: Id, top: Top = 10) -> list[dict[str, Any]]:
        """Return the queries of the index's bank, or without one the captions, that fit a video, best first."""
        with limit.enter():
            found = await while_wanted(
                request.receive, searches, lambda given_up: searcher.describe(video, top, given_up=given_up)
            )
        return [{"text": text, "score": score} for text, score in found]

    body = {"required": True, "content": {UNKNOWN_TYPE: {"schema": {"type": "string", "format": "binary"}}}}

    @app.post("/api/examples", responses=REFUSALS | UPLOAD_REFUSALS, openapi_extra={"requestBody": body})
    async def upload(
        request: Request,
        kind: Annotated[ExampleKind, Query(description="type of the body")] = "clip",
        name: Annotated[str, Query(max_length=200, description="name of the upload")] = "",
    ) -> dict[str, str]:
        """Keep the clip or image in the body as an example for later searches, until newer ones replace it."""
        decoding.require_place()  # before the body is received
        with upload_folder() as folder:
            path = folder / "example"
            with uploads.enter():
                promised = request.headers.get("content-length")
                await save_upload(request.stream(), path, promised, options.most_upload, options.upload_seconds)
            with decoding.enter():
                example = await while_wanted(
                    request.receive, decoders, lambda _: searcher.read_example(path, kind, name or f"example {kind}")
                )
        key = secrets.token_hex(8)
        examples[key] = example
        while len(examples) > EXAMPLES_KEPT:
            examples.popitem(last=False)
        return {"id": key, "name": example.name}


def _add_videos(app: FastAPI, searcher: Searcher, options: ServerOptions, shown: Callable[[str | Path], str]) -> None:
    catalog = searcher.catalog

    def facts(row: VideoRow) -> dict[str, Any]:
        return {
            "id": row.id,
            "path": shown(row.path),
            "duration": row.duration,
            "width": row.width,
            "height": row.height,
        }

    @app.get("/api/videos", responses=REFUSALS)
    def library(asked: Annotated[LibraryQuery, Query()]) -> dict[str, Any]:
        """List videos, the newest first."""
        rows, count = catalog.listed(asked.folder, asked.top, asked.after)
        return {"videos": [facts(row) for row in rows], "count": count}

    @app.get("/api/videos/{video}/about", responses=REFUSALS)
    def about(video: Id) -> dict[str, Any]:
        """Return a video's facts, its captions, and the times of its thumbnails."""
        row = facts(catalog.video(video))
        return {**row, "captions": catalog.captions_of(video), "pictures": catalog.picture_times(video, PREVIEWS)}

    @app.get("/api/videos/{video}/file", responses=REFUSALS, response_class=FileResponse)
    def file(video: Id) -> Response:
        """Return the video itself, or a range of its bytes."""
        found = handed_out(searcher.file_of(video), _served(searcher, options))
        return FileResponse(found, media_type=MEDIA_TYPES.get(found.suffix.lower(), UNKNOWN_TYPE))

    @app.get("/api/videos/{video}/picture", responses=REFUSALS, response_class=Response)
    def picture(video: Id, time: Annotated[float, Query(ge=0, le=1e7, description="seconds")] = 0.0) -> Response:
        """Return the indexed frame nearest to a time as JPEG."""
        return Response(catalog.picture(video, time), media_type="image/jpeg")

    @app.get("/api/index")
    def index() -> dict[str, Any]:
        """Return the number of videos, the scorers, the folders, and queries to try."""
        return {
            "videos": catalog.count(),
            "scorers": list(searcher.scorers),
            "normalize": ["none", "sinkhorn"] if catalog.fact("bank") else ["none"],
            "folders": searcher.folders(),
            "examples": searcher.example_queries(),
            "skipped": len(catalog.skipped()),
            "store": searcher.store.partition("://")[0],
        }

    @app.get("/health")
    def health() -> dict[str, str]:
        """Confirm that the index can be read."""
        catalog.fact("version")
        return {"status": "ok"}


def _add_page(app: FastAPI) -> None:
    kinds = {
        "index.html": "text/html",
        "app.js": "text/javascript",
        "player.js": "text/javascript",
        "app.css": "text/css",
    }
    for name, kind in kinds.items():
        content = (resources.files("tvr_lightning.search") / "page" / name).read_text(encoding="utf-8")
        address = "/" if name == "index.html" else f"/{name}"
        app.add_api_route(address, _page(content, kind), include_in_schema=False)


def _page(content: str, kind: str) -> Callable[[], Response]:
    return lambda: Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})


def _served(searcher: Searcher, options: ServerOptions) -> list[Path]:
    """Return the files and folders whose videos may be served; what the index itself names does not count."""
    return resolve_roots(options.videos) if options.videos else remembered(searcher.catalog).roots
