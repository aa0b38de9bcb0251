"""The query that the command line or the server creates and the search engine answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvr_lightning.errors import UserError, optional
from tvr_lightning.search.results import Normalize

optional("pydantic", "search", "tvr search")
from pydantic import BaseModel, Field, model_validator  # noqa: E402

MAX_TEXT = 2000
ID = "^[0-9a-f]{16}$"


class SearchQuery(BaseModel, extra="forbid"):
    """Parameters of a search: a text, an example, or both."""

    query: str = Field("", max_length=MAX_TEXT, description="description of the videos to find")
    like: str | None = Field(None, pattern=ID, description="ID of a video or of an uploaded example")
    top: int = Field(10, ge=1, le=1000, description="number of results")
    rerank: str | None = Field(None, max_length=MAX_TEXT, description="scorer of the second stage, or none")
    candidates: int = Field(256, ge=1, le=4096, description="number of segments that the second stage scores")
    normalize: Normalize = "none"
    folder: str | None = Field(None, max_length=MAX_TEXT, description="folder inside an indexed one")
    min_relevance: float | None = Field(None, ge=0, le=1, description="minimum relevance of the results")

    @model_validator(mode="after")
    def _check(self) -> SearchQuery:
        if not self.query.strip() and self.like is None:
            raise UserError("The query is empty. Describe the video in a few words.")
        options = (self.rerank, self.normalize, self.min_relevance)
        if not self.query.strip() and options != (None, "none", None):
            raise UserError(
                "rerank, normalize, and min_relevance apply only to text queries. Remove them for an example."
            )
        return self


def sentence(errors: Sequence[Any], skip: int = 0) -> str:
    """Return pydantic's errors as one line; the first `skip` parts of a location are not the user's."""
    found = [(".".join(map(str, error["loc"][skip:])), error["msg"].removeprefix("Value error, ")) for error in errors]
    return "; ".join(f"{place}: {message}" if place else message for place, message in found)
