"""What is said in videos: from a file, or as Whisper hears it; kept in the index and searched as full text."""

from __future__ import annotations

import csv
import json
import math
import pickle
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.whisper import SIZES, find_whisper_weights
from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.opening import MediaError
from tvr_lightning.media.video import probe
from tvr_lightning.progress import progress_bar
from tvr_lightning.search.captions import names_of
from tvr_lightning.search.catalog import Catalog, VideoRow
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.files import inside
from tvr_lightning.search.filters import words_of
from tvr_lightning.search.places import Places
from tvr_lightning.search.results import Said

COLUMNS = ("video_id", "start", "end", "text")
BLOCK_SECONDS = 600.0
"""Of sound in memory at a time."""
# Words that say nothing about what is spoken of.
_COMMON = frozenset(
    """a an and are as at be but by for from has have he her his i in is it its me my not of on or our she so that the
    their them they this to us was we were what when where which who will with you your""".split()  # noqa: SIM905
)


def match(query: str) -> str | None:
    """Return an FTS5 query for stretches of speech that hold the words of a query, all but one of three or more.

    None where the query has no words that tell anything.
    """
    words = sorted(words_of(query) - _COMMON)
    if not words:
        return None
    quoted = [f'"{word}"' for word in words]
    if len(words) < 3 or len(words) > 12:
        return " AND ".join(quoted)
    return " OR ".join(f"({' AND '.join(some)})" for some in combinations(quoted, len(quoted) - 1))


def read_transcripts(path: Path) -> dict[str, list[Said]]:
    """Read a file of transcripts: JSON lines, or CSV, with the columns video_id, start, end (seconds) and text.

    Returns:
        What is said in each video, by what the file calls it and in the order of time.

    Raises:
        SearchError: there is no such file, or a line that is none of these.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: Iterable[Any] = (
                csv.DictReader(file, strict=True) if path.suffix.lower() == ".csv" else map(json.loads, file)
            )
            found: dict[str, list[Said]] = {}
            for number, row in enumerate(rows, 1):
                video, said = _line(path, number, row)
                found.setdefault(video, []).append(said)
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        if isinstance(error, SearchError):
            raise
        raise SearchError(f"{path}: cannot be read as transcripts, CSV or JSON lines: {error}") from error
    return {name: sorted(all_said, key=lambda each: each.start) for name, all_said in found.items()}


def _line(path: Path, number: int, row: Any) -> tuple[str, Said]:
    try:
        said = Said(float(row["start"]), float(row["end"]), " ".join(str(row["text"]).split()))
        video = str(row["video_id"])
    except (KeyError, TypeError, ValueError) as error:
        raise SearchError(f"{path}, line {number}: {error}; expected {', '.join(COLUMNS)}") from error
    if not 0 <= said.start <= said.end or not math.isfinite(said.end):
        raise SearchError(f"{path}, line {number}: from {said.start:g} to {said.end:g} s; expected 0 <= start <= end")
    return video, said


def join_transcripts(catalog: Catalog, path: Path, roots: list[Path]) -> int:
    """Give the videos of an index what a file says is said in them; others keep what they have.

    Returns:
        How many videos were given some.

    Raises:
        SearchError: the file cannot be read, or is about none of the videos.
    """
    spoken = read_transcripts(path)
    found = {}
    for video in catalog.videos():
        said = next((spoken[name] for name in names_of(video, roots) if name in spoken), None)
        if said is not None:
            found[video.id] = said
    if not found and catalog.count():
        raise SearchError(f"{path}: is about none of the index's videos, but about {', '.join(list(spoken)[:3])}")
    catalog.set_speech(found)
    return len(found)


class Transcriber:
    """openai-whisper, from a file of weights.

    Args:
        weights: a size whose weights lie in openai-whisper's cache ("base", "small"), or a file.
        device: where it runs.

    Raises:
        MissingWeightsError: no such weights; nothing is downloaded.
        SearchError: the file holds none.
    """

    def __init__(self, weights: str, device: str = "cpu") -> None:
        if weights not in SIZES and not Path(weights).expanduser().is_file():
            raise MissingWeightsError(
                f"--transcribe {weights}: no such file; name one of Whisper's weights, or {' or '.join(SIZES)} in "
                "openai-whisper's own cache"
            )
        path = find_whisper_weights(weights, "openai") if weights in SIZES else Path(weights).expanduser()
        import whisper  # brings numba along

        try:
            self.model = whisper.load_model(str(path), device=device)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
            raise SearchError(f"{path}: cannot be read as Whisper's weights ({error})") from error

    def hear(self, path: Path) -> list[Said]:
        """Return what is said in a file, a block of its sound in memory at a time.

        Raises:
            MediaError: its sound cannot be read.
        """
        found: list[Said] = []
        seconds = probe(path).duration
        for number in range(math.ceil(seconds / BLOCK_SECONDS)):
            start = number * BLOCK_SECONDS
            track = read_audio(path, span=(start, min(start + BLOCK_SECONDS, seconds)))
            if not track.present:
                continue
            for each in self.model.transcribe(track.waveform, fp16=False, verbose=None)["segments"]:
                text = " ".join(each["text"].split())
                if text:
                    found.append(Said(start + float(each["start"]), start + float(each["end"]), text))
        return found


def transcribe(catalog: Catalog, transcriber: Transcriber, places: Places, shown: bool) -> list[str]:
    """Let Whisper hear the videos that nothing is known of; a kill costs the video under way.

    Args:
        catalog: of the index.
        transcriber: the model.
        places: what the user named; no video outside is read.
        shown: whether a progress bar is shown.

    Returns:
        "path: reason" of videos whose sound cannot be read.
    """
    problems = []
    known = catalog.heard()
    rows: list[VideoRow] = [row for row in catalog.videos() if row.id not in known and inside(row.path, places.roots)]
    with progress_bar(shown and bool(rows)) as progress:
        task = progress.add_task("transcripts", total=len(rows))
        for row in rows:
            try:
                catalog.set_speech({row.id: transcriber.hear(row.path)})
            except MediaError as error:
                problems.append(str(error))
            progress.advance(task)
    return problems
