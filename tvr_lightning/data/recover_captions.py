"""Descriptions of videos beside their captions: the file that `tvr caption` writes, or people, and DPDV trains with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tvr_lightning.data.records import SHOWN
from tvr_lightning.errors import MissingAssetError, UserError

SCHEMA = pa.schema(
    [
        ("video_id", pa.string()),
        ("segment", pa.int32()),
        ("start", pa.float64()),
        ("end", pa.float64()),
        ("caption", pa.string()),
        ("model", pa.string()),
        ("prompt", pa.string()),
        ("weights_hash", pa.string()),
    ]
)
REQUIRED = ("video_id", "segment", "caption")
WITHOUT_MODEL = (
    "`tvr caption` writes one with a vision-language model; a table written by hand serves as well: a parquet file "
    "with the columns video_id, segment (0, 1, ...) and caption, one row per description"
)


class CaptionsFileError(UserError, ValueError):
    """A captions file cannot be used; says which file, which entry, and what mends it."""


class MissingCaptions(MissingAssetError):  # noqa: N818  reads as what happened, as MissingData does
    """There is no captions file at the place that was named."""


@dataclass(frozen=True, slots=True)
class Description:
    """What is said about one segment of a video.

    Attributes:
        video_id: as in the dataset's annotation files.
        segment: number of the segment in the order of time, from 0.
        start, end: seconds.
        caption: the description.
        model: who wrote it: a model's name, or a person.
        prompt: what the model was asked; empty for people.
        weights_hash: of the model's weights; empty for people.
    """

    video_id: str
    segment: int
    start: float
    end: float
    caption: str
    model: str = ""
    prompt: str = ""
    weights_hash: str = ""


class RecoverCaptions:
    """Descriptions by video.

    Args:
        path: the file, for errors.
        descriptions: of each video id, in the order of time, empty ones left out.
        empty: how many empty ones there were.
    """

    def __init__(self, path: Path, descriptions: dict[str, list[str]], empty: int = 0) -> None:
        self.path = path
        self.descriptions = descriptions
        self.empty = empty

    def __len__(self) -> int:
        """Number of videos with a description."""
        return sum(bool(described) for described in self.descriptions.values())

    def of(self, video_id: str) -> list[str]:
        """Return the descriptions of a video in the order of time; none of a video that the file does not know."""
        return list(self.descriptions.get(video_id, []))

    def require(self, video_ids: Sequence[str]) -> None:
        """Check that every one of these videos has a description.

        Raises:
            CaptionsFileError: names videos without any, and says so where the file is another dataset's.
        """
        absent = [video_id for video_id in video_ids if not self.descriptions.get(video_id)]
        if not absent:
            return
        if len(absent) == len(video_ids):
            known = ", ".join(list(self.descriptions)[:SHOWN])
            raise CaptionsFileError(
                f"{self.path}: describes none of the {len(video_ids)} training videos ({', '.join(absent[:SHOWN])}, "
                f"...); it is about {known}: name the captions of this dataset in data.init_args.captions"
            )
        more = f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
        empty = f" ({self.empty} of its captions are empty)" if self.empty else ""
        raise CaptionsFileError(
            f"{self.path}: {len(absent)} of the {len(video_ids)} training videos have no description{empty}: "
            f"{', '.join(absent[:SHOWN])}{more}; describe them too ({WITHOUT_MODEL})"
        )


def find_captions(name: str, folder: Path) -> Path:
    """Return the captions file of that name: a path as it is, or else below the dataset's folder.

    Raises:
        MissingCaptions: it is at neither place.
    """
    places = list(dict.fromkeys((Path(name).expanduser(), folder / name)))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked = " and ".join(str(place) for place in places)
        raise MissingCaptions(f"no captions file {name}: looked for {looked}. {WITHOUT_MODEL}")
    return found


def read_captions(path: Path) -> RecoverCaptions:
    """Read a captions file.

    Args:
        path: parquet with the columns of `REQUIRED`; others are not needed for training.

    Raises:
        MissingCaptions: no such file.
        CaptionsFileError: no parquet, columns are missing or of another type, an entry without value, a segment that is
            described twice, or no description at all.
    """
    if not path.is_file():
        raise MissingCaptions(f"no captions file: looked for {path}. {WITHOUT_MODEL}")
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise CaptionsFileError(f"{path}: not a parquet file ({error}); {WITHOUT_MODEL}") from error
    absent = [name for name in REQUIRED if name not in table.column_names]
    if absent:
        raise CaptionsFileError(
            f"{path}: no column {', '.join(absent)} among {', '.join(table.column_names)}; {WITHOUT_MODEL}"
        )
    try:
        columns = [table[name].cast(SCHEMA.field(name).type).to_pylist() for name in REQUIRED]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise CaptionsFileError(f"{path}: a column has another type than {SCHEMA.names}: {error}") from error
    rows = list(zip(*columns, strict=True))
    broken = next((number for number, row in enumerate(rows) if None in row), None)
    if broken is not None:
        raise CaptionsFileError(f"{path}: row {broken} lacks a value among {', '.join(REQUIRED)}; fill or remove it")
    twice = [entry for entry, count in Counter((row[0], row[1]) for row in rows).items() if count > 1]
    if twice:
        raise CaptionsFileError(
            f"{path}: segment {twice[0][1]} of {twice[0][0]} is described more than once; number the segments "
            "of a video 0, 1, ..."
        )
    descriptions: dict[str, list[str]] = {}
    for video_id, _, caption in sorted(rows, key=lambda row: (row[0], row[1])):
        said = descriptions.setdefault(video_id, [])
        if caption.strip():
            said.append(caption.strip())
    empty = sum(not row[2].strip() for row in rows)
    if not any(descriptions.values()):
        raise CaptionsFileError(f"{path}: holds no description; {WITHOUT_MODEL}")
    return RecoverCaptions(path, descriptions, empty)


def write_captions(path: Path, descriptions: Iterable[Description]) -> None:
    """Write a captions file; equal descriptions give equal bytes."""
    table = pa.Table.from_pylist([asdict(description) for description in descriptions], schema=SCHEMA)
    pq.write_table(table, path)
