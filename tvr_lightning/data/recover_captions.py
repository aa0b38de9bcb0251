"""Additional descriptions of videos, written by `tvr caption` or by hand, and used by DPDV for training."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from tvr_lightning.data.records import expect, malformed, read_records
from tvr_lightning.errors import MissingAssetError, UserError, abbreviated

REQUIRED = ("video_id", "segment", "caption")
WITHOUT_MODEL = (
    "Create one with `tvr caption` and a vision-language model, or write a table by hand: a parquet file, CSV (.csv) "
    "or JSON Lines (.jsonl) with the columns video_id, segment (0, 1, ...), and caption, one row per description"
)


@dataclass(frozen=True, slots=True)
class Description:
    """Description of one segment of a video, from `start` to `end` in seconds, by a person or a model.

    Segments are numbered from 0 in temporal order. `prompt` and `weights_hash` are empty for human authors. `file`
    identifies the video's file, as JSON (`store.feature_store.file_mark`).
    """

    video_id: str
    segment: int
    start: float
    end: float
    caption: str
    model: str = ""
    prompt: str = ""
    weights_hash: str = ""
    file: str = ""


TYPES = {str: pa.string(), int: pa.int32(), float: pa.float64()}
SCHEMA = pa.schema([(name, TYPES[hint]) for name, hint in get_type_hints(Description).items()])


@dataclass(frozen=True)
class RecoverCaptions:
    """Descriptions of each video ID in a file in temporal order, without the `empty` ones, which are only counted."""

    path: Path
    descriptions: dict[str, list[str]]
    empty: int = 0

    def require(self, video_ids: Sequence[str]) -> None:
        """Check that each of these videos has a description."""
        absent = [video_id for video_id in video_ids if not self.descriptions.get(video_id)]
        if absent:
            raise UserError(
                f"{self.path}: {len(absent)} of the {len(video_ids)} training videos have no description "
                f"({self.empty} of its captions are empty): {abbreviated(absent)}. It describes "
                f"{next(iter(self.descriptions))} and others. Describe all of them, or set "
                f"data.init_args.extra_captions to the captions of this dataset. ({WITHOUT_MODEL})"
            )


def find_captions(name: str, folder: Path) -> Path:
    """Return the captions file at the path `name`, or else at `name` in the dataset's folder."""
    paths = list(dict.fromkeys((Path(name).expanduser(), folder / name)))
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        checked = " and ".join(map(str, paths))
        raise MissingAssetError(f"no captions file {name}: looked for {checked}. {WITHOUT_MODEL}")
    return found


def read_captions(path: Path) -> RecoverCaptions:
    """Read a captions file: CSV (.csv), Parquet (.parquet) or JSON Lines with the columns of `REQUIRED`."""
    if not path.is_file():
        raise MissingAssetError(f"no captions file: looked for {path}. {WITHOUT_MODEL}")
    captions: dict[tuple[str, int], str] = {}
    numbering = "number the segments of a video 0, 1, ..."
    for entry, record in read_records(path):
        expect(path, entry, record, dict.fromkeys(REQUIRED, object))
        video_id, segment, caption = (record[name] for name in REQUIRED)
        expect(path, f"{entry}, column caption", caption, str)
        if video_id is None or not str(video_id).strip():
            raise malformed(path, f"{entry}, column video_id", "there is no value", "write the ID of a video")
        if not re.fullmatch(r"[0-9]{1,9}(\.0)?", str(segment).strip()):
            raise malformed(path, f"{entry}, column segment", f"{segment!r} is not a whole number", numbering)
        key = str(video_id), int(float(segment))
        if key in captions:
            message = f"segment {key[1]} of {video_id} is described more than once"
            raise malformed(path, entry, message, numbering)
        captions[key] = caption.strip()
    descriptions: dict[str, list[str]] = {}
    for (video_id, _), caption in sorted(captions.items()):
        descriptions.setdefault(video_id, []).extend([caption] if caption else [])
    if not any(descriptions.values()):
        raise UserError(f"{path}: the table contains no descriptions. {WITHOUT_MODEL}")
    return RecoverCaptions(path, descriptions, sum(not caption for caption in captions.values()))


def write_captions(path: Path, descriptions: Iterable[Description]) -> None:
    """Write a captions file; equal descriptions give equal bytes."""
    table = pa.Table.from_pylist([asdict(description) for description in descriptions], schema=SCHEMA)
    pq.write_table(table, path)
