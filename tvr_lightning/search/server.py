"""A web page and an API that search an index. Clients send IDs of videos, never paths."""

import asyncio
import contextlib
import hmac
import ipaddress
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from mimetypes import add_type, guess_type
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from tvr_lightning import __version__
from tvr_lightning.errors import abbreviated, optional
from tvr_lightning.media.container import VIDEO_SUFFIXES, MediaError
from tvr_lightning.media.image import ImageError
from tvr_lightning.search.engine import ExampleKind, Searcher
from tvr_lightning.search.errors import SearchError, UnknownVideoError, UnreadableError
from tvr_lightning.search.files import NamedPaths, relative, within
from tvr_lightning.search.query import ID, MAX_TEXT, SearchQuery, sentence
from tvr_lightning.search.results import Answer, printable
from tvr_lightning.search.table import VideoRow

optional("fastapi", "search", "tvr serve")
import anyio  # noqa: E402
from fastapi import Depends, FastAPI, HTTPException, Query, Request  # noqa: E402
from fastapi import Path as InPath  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response  # noqa: E402
from fastapi.staticfiles import StaticFiles  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; media-src 'self' blob:; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
add_type("video/x-matroska", ".mkv")  # unknown to older versions of Python
UPLOADS = "tvr-search-"
OLD_UPLOAD = 3600.0  # seconds, after which only a killed server can have left an upload
REFUSALS: dict[int | str, dict[str, Any]] = {status: {} for status in (400, 401, 403, 404, 408, 413, 422, 429)}
"""Statuses of refused requests for the schema; `detail` in the answer is the reason."""
BYTES = {"type": "string", "format": "binary"}
Id = Annotated[str, InPath(pattern=ID, description="ID of a video in the index")]


@dataclass(frozen=True)
class ServerOptions:
    """Options of `tvr serve`; `max_upload` is in bytes, and `max_decoding` uploads are decoded at the same time."""

    host: str = "127.0.0.1"
    port: int = 8321
    token: str | None = None
    max_upload: int = 64 * 2**20
    max_pending: int = 16
    upload_seconds: float = 120.0
    videos: tuple[Path, ...] = ()
    max_decoding: int = 2

    def required_token(self) -> str | None:
        """Return the token that clients must send; None if only this machine can connect."""
        token = self.token or os.environ.get("TVR_SEARCH_TOKEN")
        return token or (None if is_local(self.host) else secrets.token_urlsafe(24))


class Library(BaseModel):
    """Some videos, and the number of all."""

    videos: list[VideoRow]
    count: int


class IndexFacts(BaseModel):
    """Contents of the index."""

    videos: int
    scorers: list[str]
    normalize: list[str]
    folders: list[dict[str, Any]]
    skipped: int


def is_local(host: str) -> bool:
    """Return whether only this machine reaches a server that is bound to an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def limited(limiter: anyio.CapacityLimiter, what: str) -> Callable[[], AsyncIterator[None]]:
    """Return a dependency that refuses requests if too many are in progress."""

    async def place() -> AsyncIterator[None]:
        borrower = object()
        try:
            limiter.acquire_on_behalf_of_nowait(borrower)
        except anyio.WouldBlock as error:
            detail = f"{limiter.total_tokens:g} {what} are in progress or pending. Try again in a moment."
            raise HTTPException(429, detail, {"Retry-After": "5"}) from error
        try:
            yield
        finally:
            limiter.release_on_behalf_of(borrower)

    return place


def create_app(searcher: Searcher, options: ServerOptions, token: str | None = None) -> FastAPI:
    """Create the application. Clients must send the token, if there is one."""

    def refuse_unknown(request: Request) -> None:
        operation = app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
        known = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
        if unknown := next((name for name in request.query_params if name not in known), None):
            detail = f"{unknown[:100]} is not a parameter of this route. Its parameters: {', '.join(known) or 'none'}."
            raise HTTPException(422, detail)

    check = [Depends(refuse_unknown)]
    app = FastAPI(
        title="tvr search", version=__version__, docs_url=None, redoc_url=None, dependencies=check, responses=REFUSALS
    )
    app.state.searches = anyio.CapacityLimiter(options.max_pending)
    app.state.uploads = anyio.CapacityLimiter(options.max_pending)
    decoders, table = anyio.CapacityLimiter(options.max_decoding), searcher.table
    for folder in Path(tempfile.gettempdir()).glob(f"{UPLOADS}*"):
        with contextlib.suppress(OSError):  # another server has just removed it
            if time.time() - folder.lstat().st_mtime > OLD_UPLOAD:
                shutil.rmtree(folder, ignore_errors=True)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refusal(request, token, is_local(options.host)) or await call_next(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    # Errors become a status and one sentence, without paths of this machine and stack traces.
    def handle(kind: type[Exception], status: int, detail: Callable[[Any], str]) -> None:
        async def respond(_: Request, error: Exception) -> Response:
            if status >= 500:
                print(f"tvr serve: {error}", file=sys.stderr)
            return JSONResponse({"detail": detail(error)}, status)

        app.add_exception_handler(kind, respond)

    handle(SearchError, 400, str)
    handle(UnknownVideoError, 404, str)
    handle(UnreadableError, 500, lambda _: "The index cannot be read. The server's log gives the reason.")
    handle(ClientDisconnect, 400, lambda _: "the upload was interrupted")
    handle(MediaError, 422, lambda e: f"the {'image' if isinstance(e, ImageError) else 'clip'} {e.reason}")
    handle(RequestValidationError, 422, lambda error: sentence(error.errors(), 1))

    def shown(row: VideoRow) -> VideoRow:
        return replace(row, path=Path(relative(row.path, table.roots)))

    @app.get("/api/search", dependencies=[Depends(limited(app.state.searches, "searches"))])
    def search(query: Annotated[SearchQuery, Query()]) -> Answer:
        """Find videos by text, by an example, or by both."""
        answer, roots = searcher.search(query), table.roots
        results = [replace(result, path=relative(Path(result.path), roots)) for result in answer.results]
        return replace(answer, results=results)

    @app.post(
        "/api/examples",
        dependencies=[Depends(limited(app.state.uploads, "uploads"))],
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": BYTES}}}},
    )
    async def upload(
        request: Request,
        kind: Annotated[ExampleKind, Query(description="type of the body")] = "clip",
        name: Annotated[str, Query(max_length=200, description="name of the upload")] = "",
    ) -> dict[str, str]:
        """Keep the clip or image in the body as an example for later searches, until newer ones replace it."""
        name = name or f"example {kind}"
        with tempfile.TemporaryDirectory(prefix=UPLOADS) as folder:
            path = Path(folder) / "example"
            await _save_upload(request, path, options)
            example = await anyio.to_thread.run_sync(searcher.add_example, path, kind, name, limiter=decoders)
        return {"id": example, "name": name}

    @app.get("/api/videos")
    def library(
        folder: Annotated[str | None, Query(max_length=MAX_TEXT, description="folder inside an indexed one")] = None,
        top: Annotated[int, Query(ge=1, le=100, description="number of videos")] = 24,
        after: Annotated[int, Query(ge=0, le=10**9, description="number of videos to skip")] = 0,
    ) -> Library:
        """List videos, the newest first."""
        rows, count = table.listed(folder, top, after)
        return Library(videos=[shown(row) for row in rows], count=count)

    @app.get("/api/videos/{video}/about")
    def about(video: Id) -> VideoRow:
        """Return facts about a video and its captions."""
        return shown(table.video(video))

    @app.get("/api/videos/{video}/file", response_class=FileResponse)
    def file(video: Id) -> Response:
        """Return the video itself, or a range of its bytes."""
        path = Path(os.path.realpath(table.video(video).path))
        if not within(path, _served_folders(searcher, options)) or path.suffix.lower() not in VIDEO_SUFFIXES:
            raise SearchError(f"{path.name} is not a video in a folder that may be served. See tvr serve --videos.")
        if not os.access(path, os.R_OK):
            raise SearchError(f"{path.name} cannot be read. Run tvr index again.")
        return FileResponse(path, media_type=guess_type(path.name)[0] or "application/octet-stream")

    @app.get("/api/videos/{video}/image", response_class=Response)
    def thumbnail(video: Id, time: Annotated[float, Query(ge=0, le=1e7, description="seconds")] = 0.0) -> Response:
        """Return the indexed frame nearest to a time as JPEG."""
        return Response(table.thumbnail(video, time), media_type="image/jpeg")

    @app.get("/api/index")
    def index() -> IndexFacts:
        """Return the numbers of videos, the scorers, and the folders."""
        return IndexFacts(
            videos=table.count(),
            scorers=searcher.rerankers,
            normalize=["none", "sinkhorn"] if table.fact("bank") else ["none"],
            folders=searcher.folders(),
            skipped=len(table.skipped()),
        )

    @app.get("/health")
    def health() -> dict[str, str]:
        """Confirm that the index can be read."""
        table.count()
        return {"status": "ok"}

    app.mount("/", StaticFiles(packages=[("tvr_lightning.search", "page")], html=True))
    return app


def serve(searcher: Searcher, options: ServerOptions) -> None:
    """Serve until interrupted, and finish current requests."""
    uvicorn = optional("uvicorn", "search", "tvr serve")
    token = options.required_token()
    served = _served_folders(searcher, options)
    if kept := [str(root) for root in searcher.table.roots if not within(root, served)]:
        named = f"{printable(abbreviated(kept, 1))}, which only the index names"
        print(f"Not served: the videos in {named}. To serve them, add --videos FOLDER.", file=sys.stderr)
    config = uvicorn.Config(
        create_app(searcher, options, token), log_level="warning", timeout_graceful_shutdown=10, server_header=False
    )
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise SearchError(
            f"Cannot listen on {host}:{options.port} ({error.strerror or error}). Choose another --port."
        ) from error
    shown = f"?token={quote(token)}" if token else ""
    print(f"Open http://{host}:{listening.getsockname()[1]}/{shown}  (Ctrl-C to stop)", flush=True)
    with listening:
        uvicorn.Server(config).run(sockets=[listening])


def _refusal(request: Request, token: str | None, local: bool) -> Response | None:
    """Return the refusal of a request by its host, origin, parameters, or token."""
    host = request.url.hostname or ""
    if local and not is_local(host):
        # The name of another site may point here, but its scripts must not read an index without a token.
        return JSONResponse({"detail": f"served on this machine only, not as {host[:100]}"}, 400)
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    # Older browsers do not send Sec-Fetch-Site. Schemes are not compared, since a proxy may add TLS.
    if site is None and origin and origin.partition("://")[2].lower() != request.headers.get("host", "").lower():
        site = "cross-site"
    asks = request.method == "POST" or request.url.path == "/api/search" or (origin and site == "cross-site")
    if asks and site not in (None, "none", "same-origin"):
        detail = "Requests from pages of other origins are rejected. Open this server's own page."
        return JSONResponse({"detail": detail}, 403)
    counts = Counter(name for name, _ in request.query_params.multi_items())
    if twice := next((name for name, count in counts.items() if count > 1), None):
        return JSONResponse({"detail": f"{twice[:100]} is given more than once. Give it once."}, 400)
    if token is None or request.url.path == "/health":
        return None
    cookie = f"tvr_token_{request.scope['server'][1]}"  # browsers send cookies to all ports of a host
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    if request.url.path == "/" and _equal(request.query_params.get("token", ""), token):
        response = RedirectResponse("/", 303)
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response
    if _equal(request.cookies.get(cookie, ""), token) or (scheme.lower() == "bearer" and _equal(bearer.strip(), token)):
        return None
    detail = "Send the token as Authorization: Bearer TOKEN, or open /?token=TOKEN once."
    return JSONResponse({"detail": detail}, 401, {"WWW-Authenticate": "Bearer"})


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())  # in constant time


async def _save_upload(request: Request, path: Path, options: ServerOptions) -> None:
    """Write the body of a request to a file, within the limits of size and time."""
    too_large = HTTPException(
        413, f"The clip is larger than {options.max_upload / 2**20:g} MiB. Shorten it, or raise --max_upload_mib."
    )
    if int(request.headers.get("content-length", 0)) > options.max_upload:
        raise too_large
    size = 0
    try:
        async with asyncio.timeout(options.upload_seconds):
            with path.open("wb") as file:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > options.max_upload:
                        raise too_large
                    file.write(chunk)
    except TimeoutError as error:
        detail = f"The upload took longer than {options.upload_seconds:g} seconds. Send a shorter clip."
        raise HTTPException(408, detail) from error
    if not size:
        raise HTTPException(400, "The upload is empty. Send the bytes of a video as the body.")


def _served_folders(searcher: Searcher, options: ServerOptions) -> set[Path]:
    """Return the files and folders whose videos may be served; those that only the index names do not count."""
    named = options.videos or NamedPaths.load(str(searcher.table.fact("identity"))).videos
    return {Path(os.path.realpath(path)) for path in named}
