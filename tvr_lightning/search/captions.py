"""What is said of videos in words: joined from a file that `tvr caption` or a person wrote, or by a captioner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tvr_lightning.data.records import VideoRecord
from tvr_lightning.data.recover_captions import read_captions
from tvr_lightning.encoders.caption_journal import CaptionJournalError
from tvr_lightning.encoders.captioner import Captioner, CaptionOptions, caption
from tvr_lightning.search.catalog import Catalog, VideoRow
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.files import inside
from tvr_lightning.search.places import AllowedRoots

FILE = "captions.parquet"
SEGMENTS = 3
"""Parts of a video that a captioner describes, each in a sentence: beginning, middle, end."""


@dataclass
class CaptionJoinReport:
    """What joining captions did.

    Attributes:
        captioned: videos of the index that have captions now.
        problems: "path: reason" of a file that is gone, and of videos that a captioner could not read.
    """

    captioned: int
    problems: list[str]


def names_of(video: VideoRow, roots: list[Path]) -> list[str]:
    """Return what a captions file may call a video, the most exact name first."""
    below = [video.path.relative_to(root) for root in roots if root in video.path.parents]
    paths = [*below, Path(video.path.name)]
    return [state_name(video), *(name for path in paths for name in (path.as_posix(), path.with_suffix("").as_posix()))]


def state_name(video: VideoRow) -> str:
    """Return the name of this state of a video's file; a file that changes gets another one, and is described anew."""
    return f"{video.key:016x}"


def join_captions(catalog: Catalog, given: Path | None, roots: list[Path], places: AllowedRoots) -> CaptionJoinReport:
    """Give the videos of an index their captions.

    Args:
        catalog: of the index.
        given: captions file (`data.recover_captions`); None takes the one that the user gave before.
        roots: files and folders of the index.
        places: what the user named; is told of the file.

    Raises:
        MissingCaptions: there is no such file.
        UserError: the file is none of captions.
        SearchError: it describes none of the videos.
    """
    remembered = catalog.fact("captions")
    if given is None and remembered not in (None, places.captions):  # an index must not choose which file is read
        strange = f"{remembered}: a captions file that you have not named. Name one with --captions FILE"
        return CaptionJoinReport(catalog.captioned(), [strange])
    if given is None and (remembered is None or not Path(remembered).is_file()):
        problems = (
            []
            if remembered is None
            else [f"{remembered}: the captions file is missing, so changed videos have no captions"]
        )
        return CaptionJoinReport(catalog.captioned(), problems)
    path = given or Path(remembered)
    described = read_captions(path)
    found = {}
    for video in catalog.videos():
        texts = next((texts for name in names_of(video, roots) if (texts := described.of(name))), None)
        if texts:
            found[video.id] = texts
    if not found and given is not None and catalog.count():
        known = ", ".join(list(described.descriptions)[:3])
        raise SearchError(
            f"{path} describes none of the index's videos, but others, such as {known}. Name videos by "
            "their path in the indexed folder or by their file name."
        )
    catalog.set_captions(found)
    places.captions = str(path.resolve())
    catalog.set_fact("captions", places.captions)
    return CaptionJoinReport(catalog.captioned(), [])


def describe_videos(
    catalog: Catalog, captioner: Captioner, roots: list[Path], places: AllowedRoots, shown: bool
) -> CaptionJoinReport:
    """Let a captioner describe the videos that it has not described yet, and join what it says."""
    rows = [row for row in catalog.videos() if inside(row.path, places.roots)]
    out = catalog.folder / FILE
    options = CaptionOptions(out, segments=SEGMENTS, progress=shown, num_workers=0)
    try:
        report = caption([VideoRecord(state_name(row), row.path) for row in rows], captioner, options)
    except CaptionJournalError as error:
        raise SearchError(f"{error} To describe all videos again, delete {out} and {out.name}.unfinished.") from error
    joined = join_captions(catalog, out, roots, places)
    joined.problems += report.skipped
    return joined
