"""What the server answers the searches of the user who started it, who may name files and see where videos lie."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from tvr_lightning.media.opening import MediaError
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import optional
from tvr_lightning.search.local import LocalIndex
from tvr_lightning.search.question import Question
from tvr_lightning.search.running import HEADER, REFUSED, ROUTE

optional("fastapi", "tvr serve")
from fastapi import FastAPI, Request  # noqa: E402
from fastapi.responses import JSONResponse, Response  # noqa: E402


def add_owner_search(
    app: FastAPI, searcher: Searcher, key: str, run: Callable[[Request, Callable[..., Any]], Awaitable[Any]]
) -> None:
    """Add the address that `tvr search` asks.

    Args:
        app: the application; counts the uploads and examples that are decoded at once.
        searcher: answers.
        key: what the search must show; only files of the server's own user hold it.
        run: runs work while the client is there, within the limits of all searches.
    """
    source = LocalIndex(searcher, public=False)

    @app.post(ROUTE, include_in_schema=False)
    async def search(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get(HEADER, "").encode(), key.encode()):
            return JSONResponse({"detail": "this address only answers the user who runs the server"}, 401)
        question = await request.json()
        try:
            answer = await run(request, lambda _: Question(**question).ask(source))
        except MediaError as error:
            return JSONResponse({"detail": str(error)}, REFUSED)
        return JSONResponse(answer.plain())
