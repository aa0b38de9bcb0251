"""Dataset check: all problems of the annotations and files of a dataset in one report."""

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Problem, Split, VideoRecord, shared_videos
from tvr_lightning.errors import abbreviated
from tvr_lightning.files import write_whole
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.read_many import read_all
from tvr_lightning.media.video import probe, read_clip
from tvr_lightning.option_types import FrameSampling
from tvr_lightning.progress import shown

TOO_SHORT_SECONDS = 1.0  # most methods use one frame per second
ROWS_PER_KIND = 20
DECODED_SIZE = 32  # pixels; whether a frame can be decoded does not depend on the size


@dataclass
class Report:
    """Result of a dataset check, with the protocol of the test split and the numbers of videos and texts by split.

    `problems` must be fixed; `warnings` may be intended, such as videos without audio; `notes` are known quirks of the
    released files and how they are read.
    """

    dataset: str
    protocol: str = ""
    videos: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)


def check(data: TextVideoDataModule, *, decode: bool = False, workers: int = 1, progress: bool = True) -> Report:
    """Check all annotations and all video files of a dataset; `decode` also decodes the evaluation frames."""
    report = Report(data.title)
    splits: list[Split] = []
    for name in data.official_splits:
        absent = [path for path in data.required_files(name) if not path.is_file()]
        if absent:
            fix = f"expected layout:\n{data.layout}"
            report.problems += [Problem(str(path), path.name, "missing-file", "no such file", fix) for path in absent]
            continue
        with shown(f"reading the annotations of {data.title}, {name}") if progress else nullcontext():
            split, findings = data.examine_split(name)
        report.problems += findings.problems
        report.notes += findings.notes
        if split is not None:
            splits.append(split)
            report.videos[name] = len(split.videos)
            report.texts[name] = len(split.texts)
            report.protocol = split.protocol
    for one, other in combinations(splits, 2):
        message = f"the video is in {one.name} and in {other.name}"
        fix = "remove it from one of the two splits"
        report.problems += [_problem(video, "split-overlap", message, fix) for video in shared_videos(one, other)]
    if data.features is None:  # stored features replace the files
        videos = list({(video.path, video.span): video for split in splits for video in split.videos}.values())
        read = partial(check_video, frames=data.frames if decode else 0, sampling=data.sampling)
        results = read_all(videos, read, workers=workers, title=f"checking {data.title}", progress=progress)
        for video, found in zip(videos, results, strict=True):
            if isinstance(found, MediaError):
                fix = "download it again, or set on_corrupt to skip"
                found = [_problem(video, "undecodable", found.reason, fix)]
            for problem in found:
                (report.warnings if problem.kind == "silent" else report.problems).append(problem)
    for listed in (report.problems, report.warnings, report.notes):
        listed[:] = dict.fromkeys(listed)  # splits and spans share files
    return report


def check_video(video: VideoRecord, frames: int = 0, sampling: FrameSampling = "one-fps-uniform") -> list[Problem]:
    """Return the problems of one video file, of which `frames` frames are decoded, or raise VideoError."""
    path = video.path
    if not path.is_file():
        return [_problem(video, "missing-file", "no such file", "download it, or set on_corrupt to skip")]
    if not path.stat().st_size:
        return [_problem(video, "empty-file", "it has no bytes", "download it again")]
    info = probe(path)
    if info.broken:
        return [_problem(video, "undecodable", f"it ends early: {info.broken}", "download it again")]
    if frames:
        read_clip(path, frames, Preparation(DECODED_SIZE), sampling, video.span)
    problems = []
    if not info.has_audio:
        fix = "download it again, or ignore this if it is a silent video (methods with audio get silence)"
        problems.append(_problem(video, "silent", "it has no audio track", fix))
    if not info.timed:
        message = f"all its frames have the same timestamp; they are read in order, at {info.fps:g} frames per second"
        fix = f"if its rate is different, rewrite it with the right one: ffmpeg -r RATE -i {path.name} NEW{path.suffix}"
        problems.append(_problem(video, "untimed", message, fix))
    if info.duration < TOO_SHORT_SECONDS:
        message = f"it lasts {info.duration:.2f} s, less than {TOO_SHORT_SECONDS:g} s"
        problems.append(_problem(video, "too-short", message, "download it again"))
    return problems


def _problem(video: VideoRecord, kind: str, message: str, fix: str) -> Problem:
    # The problem belongs to the file, not the record: spans of one file share it.
    return Problem(str(video.path), video.path.name, kind, message, fix)


def write_report(report: Report, path: Path) -> None:
    """Write the whole report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
    write_whole(path, content.encode("utf-8", errors="backslashreplace"))


def print_report(report: Report) -> None:
    """Print the number of videos and texts, and the problems and warnings by kind, each with its first entries."""
    console = Console(highlight=False)
    seen = "; ".join(f"{name}: {report.videos[name]} videos, {report.texts[name]} texts" for name in report.videos)
    console.print(f"[bold]{report.dataset}[/bold] ({report.protocol}); {seen}")
    for kind, found in _by_kind(report.problems).items():
        # All files have the same parents, which are in the JSON report.
        rows = [("/".join(Path(p.file).parts[-2:]), p.entry, p.message, p.fix) for p in found]
        if len({row[2:] for row in rows}) == 1:
            names = [file if file.endswith(entry) else f"{entry} in {file}" for file, entry, *_ in rows]
            line = f"{kind}: {abbreviated(names, ROWS_PER_KIND)}: {found[0].message}; {found[0].fix}"
            console.print(line, markup=False)
            continue
        columns = (Column(title, overflow="fold") for title in ("file", "entry", "problem", "fix"))
        table = Table(*columns, title=f"{kind}: {len(found)}", title_justify="left", expand=True)
        for row in rows[:ROWS_PER_KIND]:
            table.add_row(*map(escape, row))
        if len(found) > ROWS_PER_KIND:
            table.add_row(f"and {len(found) - ROWS_PER_KIND} more", "", "", "--report=FILE writes them all")
        console.print(table)
    for kind, found in _by_kind(report.warnings).items():
        line = f"warning: {kind}, files: {len(found)}, first {found[0].entry}: {found[0].message}; {found[0].fix}"
        console.print(line, markup=False)
    more = [f"and {len(report.notes) - ROWS_PER_KIND} more"] if len(report.notes) > ROWS_PER_KIND else []
    for note in [*report.notes[:ROWS_PER_KIND], *more]:
        console.print(f"note: {note}", markup=False)
    total = _total(report.problems, "problem") or "No problems found."
    console.print(f"{total} {_total(report.warnings, 'warning')}".strip())


def _by_kind(found: list[Problem]) -> dict[str, list[Problem]]:
    kinds = Counter(problem.kind for problem in found).most_common()
    return {kind: [problem for problem in found if problem.kind == kind] for kind, _ in kinds}


def _total(found: list[Problem], noun: str) -> str:
    kinds = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in _by_kind(found).items())
    return f"{len(found)} {noun}{'s' * (len(found) != 1)}: {kinds}." if found else ""
