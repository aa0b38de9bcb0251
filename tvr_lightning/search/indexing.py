"""Indexing of videos. Only new, changed, and deleted files are processed; if it is killed, one batch is lost."""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.markup import escape
from rich.progress import Progress

from tvr_lightning.data.batch import Media
from tvr_lightning.data.recover_captions import RecoverCaptions, read_captions
from tvr_lightning.extract.batches import map_in_ray
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.video import probe
from tvr_lightning.progress import progress_bar
from tvr_lightning.search.engine import load_scorers
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.files import NamedPaths, VideoFile, find_videos, resolve_roots, within
from tvr_lightning.search.relevance import BACKGROUND, Scale
from tvr_lightning.search.results import printable
from tvr_lightning.search.scorer import Scorer, ScorerSource
from tvr_lightning.search.segments import SegmentClips, Segments, read_segments, read_whole
from tvr_lightning.search.table import IndexTable, State, VideoRow, encoded_path, feature_bytes

T = TypeVar("T")
Rows = list[dict[str, Any]]  # of the table
Encode = Callable[[Sequence[list[VideoFile]], Progress], Iterator[list[Rows]]]
REMOVED_WITHOUT_PRUNE = 0.05
"""Maximum share of an index that is removed without `prune`; a single video always is."""
ROWS_PER_COMMIT = 1024
"""Maximum number of segments per commit. Small indexes commit fewer, because an interruption loses them."""


@dataclass
class IndexReport:
    """Numbers of videos added, kept, removed, in the index, and with captions; "path: reason" of the others."""

    added: int = 0
    kept: int = 0
    removed: int = 0
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    total: int = 0
    captioned: int = 0

    def lines(self) -> list[str]:
        """Return the report as sentences."""
        lines = [f"{self.added} videos added, {self.kept} kept, {self.removed} removed; {self.total} in the index"]
        if self.captioned:
            lines.append(f"{self.captioned} videos have captions")
        return lines + [f"skipped: {reason}" for reason in self.skipped] + [f"not indexed: {p}" for p in self.problems]


def index(
    videos: Sequence[str | Path],
    out: str | Path,
    scorers: Sequence[ScorerSource] = (),
    bank: Sequence[str] | None = None,
    batch_size: int = 16,
    workers: int = 2,
    device: str = "cpu",
    progress: bool = True,
    captions: str | Path | None = None,
    trust: Sequence[str] = (),
    segments: Segments | None = None,
    prune: bool = False,
    actors: int | None = None,
    address: str | None = None,
) -> IndexReport:
    """Create or update an index of videos. None keeps the setting of the index.

    Args:
        videos: Files and folders; by default those of the index.
        out: Folder or address of the index.
        scorers: Methods; the vectors of the first one find the candidates.
        bank: Sample queries for the normalization of scores.
        batch_size: Number of videos per pass through an encoder.
        workers: Number of threads that decode.
        device: Device for the encoders.
        progress: Whether to show a progress bar.
        captions: File with captions (`data.recover_captions`).
        trust: Modules whose classes the checkpoints may also name. Their code is run.
        segments: Rule for cutting long videos.
        prune: Permission to remove videos that are missing, even if they are more than 5 % of the index.
        actors: Number of actors of a Ray cluster that read and encode instead of this process, which writes.
        address: Address of a running cluster; by default one on this machine.

    Raises:
        SearchError: There is nothing to index, options differ from those of the index, `out` contains other files, many
            videos are missing without `prune`, or the disk is full.
    """
    described = None if captions is None else read_captions(Path(captions))  # before hours of indexing
    given = resolve_roots(videos) if videos else []
    table = IndexTable(out, create=True)
    named, roots = NamedPaths.load(str(table.fact("identity"))), table.roots
    if not given and (strange := [str(root) for root in roots if str(root) not in named.videos]):
        raise SearchError(
            f"{out} lists {', '.join(strange)}, which you have not named here. To index them, run tvr index "
            f"{shlex.join([*strange, '--out', str(out)])}"
        )
    walked = given or resolve_roots(named.videos)
    models = load_scorers(table, scorers, device, trust)
    known = table.fact("segments")
    rule = segments or Segments(**(known or {}))
    if known and rule != Segments(**known):
        raise SearchError(
            f"{out}: its videos are cut into {known['kind']} of {known['length']:g} s, overlapping by "
            f"{known['overlap']:g} s. Index into a new folder, or omit the options for segments."
        )
    table.set_fact("segments", dataclasses.asdict(rule))
    table.set_fact("roots", sorted({*map(str, roots), *map(str, given)}))
    named.videos = sorted({*named.videos, *map(str, given)})
    if bank is not None:
        table.set_fact("bank", [line for line in bank if line.strip()])
    encoder = VideoEncoder(models, rule, batch_size)

    def encode(groups: Sequence[list[VideoFile]], bar: Progress) -> Iterator[list[Rows]]:
        if actors is None:
            return encoder.encode_all(groups, workers, bar)
        return map_in_ray(lambda: encoder, groups, actors, address, device, progress=False)

    report = _update(table, encoder, encode, walked, progress, prune)
    report.problems += _join_captions(table, described, named)
    report.problems += named.save(str(table.fact("identity")))
    report.captioned = table.captioned()
    return report


def _join_captions(table: IndexTable, given: RecoverCaptions | None, named: NamedPaths) -> list[str]:
    """Set the captions of the videos from the given file or the one that the user named before; return problems."""
    known, roots = table.fact("captions"), table.roots
    if given is None and known is None:
        return []
    if given is None and known != named.captions:  # an index must not choose which file is read
        return [f"{known}: a captions file that you have not named. Name one with --captions FILE"]
    if given is None and not Path(known).is_file():
        return [f"{known}: the captions file is missing, so changed videos have no captions"]
    described = read_captions(Path(known)) if given is None else given

    def texts(video: VideoRow) -> list[str]:
        paths = [*(video.path.relative_to(root) for root in roots if root in video.path.parents), Path(video.path.name)]
        names = [name for path in paths for name in (path.as_posix(), path.with_suffix("").as_posix())]
        return next((found for name in names if (found := described.descriptions.get(name))), [])

    found = {video.id: lines for video in table.videos() if (lines := texts(video))}
    if not found and given is not None and table.count():
        raise SearchError(
            f"{described.path} describes none of the index's videos, but others, such as "
            f"{', '.join(list(described.descriptions)[:3])}. Name videos by their path in the indexed folder or by "
            "their file name."
        )
    table.set_captions(found)
    named.captions = str(described.path.resolve())
    table.set_fact("captions", named.captions)
    return []


@dataclass
class VideoEncoder:
    """Reader and encoder of batches of videos, in this process or as an actor of a Ray cluster."""

    models: dict[str, Scorer]
    rule: Segments
    batch_size: int

    def __call__(self, files: Sequence[VideoFile]) -> list[Rows]:
        """Return the rows of each video of a batch."""
        return self.encode([(file, self.read(file)) for file in files])

    def read(self, file: VideoFile) -> SegmentClips | str | None:
        """Read a video as one segment. Return the reason if it cannot be read, and None for a longer video."""
        return _attempt(file, lambda: None if self.rule.cuts(file.path) else read_whole(file.path, self.models))

    def encode(
        self, group: Sequence[tuple[VideoFile, SegmentClips | str | None]], progress: Progress | None = None
    ) -> list[Rows]:
        """Return the rows of each video that `read` has read. Longer videos are read here."""
        whole = [(file, 0, read) for file, read in group if isinstance(read, SegmentClips)]
        encoded = iter(self._rows(whole) if whole else [])
        rows: list[Rows] = []
        for file, read in group:
            if isinstance(read, SegmentClips):
                rows.append([next(encoded) | {"duration": read.end}])
            else:
                found: Rows | str = _attempt(file, partial(self._long, file, progress)) if read is None else read
                rows.append([_row(file, 0) | {"reason": found}] if isinstance(found, str) else found)
        return rows

    def encode_all(self, groups: Sequence[list[VideoFile]], workers: int, progress: Progress) -> Iterator[list[Rows]]:
        """Yield the rows of each video of each group while threads read the next group."""
        with ThreadPoolExecutor(workers) as pool:
            read = ([*zip(group, pool.map(self.read, group), strict=True)] for group in groups)
            for group in read_ahead(read):
                yield self.encode(group, progress)

    def _rows(self, block: Sequence[tuple[VideoFile, int, SegmentClips]]) -> Rows:
        """Encode segments, each given with its video and number."""
        features = {
            name: model.encode_videos(Media.cat([segment.clips[name].media for *_, segment in block]))
            for name, model in self.models.items()
        }
        first = next(iter(self.models))
        vectors = self.models[first].video_vectors(features[first]).float().numpy()
        rows = []
        for i, (file, place, segment) in enumerate(block):
            row = _row(file, place) | {"start": segment.start, "end": segment.end, "vector": vectors[i]}
            row |= {"width": segment.size[0], "height": segment.size[1], "times": list(segment.thumbnails)}
            row["thumbnails"] = list(segment.thumbnails.values())
            for name, found in features.items():
                row[f"features-{name}"] = feature_bytes(found[i : i + 1], segment.clips[name].times)
            rows.append(row)
        return rows

    def _long(self, file: VideoFile, progress: Progress | None) -> Rows:
        """Read and encode a video segment by segment."""
        bar = progress.add_task(escape(f"{printable(file.path.name)}, seconds"), total=0) if progress else None
        rows: Rows = []
        try:
            duration = probe(file.path).duration
            segments = enumerate(read_segments(file.path, self.models, self.rule))
            for block in read_ahead(iter(lambda: list(itertools.islice(segments, self.batch_size)), [])):
                rows += self._rows([(file, place, segment) for place, segment in block])
                if progress and bar is not None:
                    progress.update(bar, total=round(duration), completed=round(min(block[-1][1].end, duration)))
        finally:
            if progress and bar is not None:
                progress.remove_task(bar)
        return [row | {"duration": duration} for row in rows]


def _row(file: VideoFile, place: int) -> dict[str, Any]:
    state = {"path": encoded_path(file.path), "modified": file.modified, "bytes": file.size}
    return {"id": file.id, "place": place, "key": file.span_key(place), **state}


def _update(
    table: IndexTable, encoder: VideoEncoder, encode: Encode, roots: Sequence[Path], shown: bool, prune: bool
) -> IndexReport:
    """Write the new and changed videos of files and folders, and remove missing ones."""
    states = table.states()
    files, problems, unread = find_videos(roots)
    if not files and not states:
        raise SearchError("; ".join([f"no videos in {', '.join(map(str, roots))}", *problems]))
    missing, unmounted = _missing(table.address, states, set(roots), files, unread, prune)
    if missing:
        table.commit([], missing)
    unchanged = {file.id for file in files if file.id in states and states[file.id][0] == file}
    pending = [file for file in files if file.id not in unchanged]
    kept = sum(states[video][1] for video in unchanged)
    report = IndexReport(kept=kept, removed=len(missing), problems=problems + unmounted)
    groups = [pending[i : i + encoder.batch_size] for i in range(0, len(pending), encoder.batch_size)]
    rows: Rows = []
    with progress_bar(shown) as progress:
        task = progress.add_task("videos", total=len(files), completed=len(unchanged))
        for group in itertools.chain(encode(groups, progress), [[]]):  # the last commits the rest
            rows += itertools.chain.from_iterable(group)
            report.added += sum("reason" not in video[0] for video in group)
            enough = max(encoder.batch_size, min(ROWS_PER_COMMIT, (kept + report.added) // 256)) if group else 1
            if len(rows) >= enough and (report.added or not table.is_new):  # a new table needs a vector
                table.commit(rows, sorted({row["id"] for row in rows if row["id"] in states}))
                table.optimize()
                rows = []
            progress.advance(task, len(group))
    if rows:
        reasons = "; ".join(f"{file.path}: {row['reason']}" for file, row in zip(pending[:3], rows, strict=False))
        raise SearchError(f"no index was created, since no video could be read: {reasons}")
    table.optimize(finish=True)
    _calibrate(table, next(iter(encoder.models.values())))
    report.skipped, report.total = table.skipped(), table.count()
    return report


def _calibrate(table: IndexTable, model: Scorer) -> None:
    """Set the scale of relevance if the index has changed."""
    keys, known = table.keys(), table.fact("relevance")
    state = [len(keys), sum(keys) % 2**53]
    if known is not None and known["of"] == state:
        return
    background = model.text_vectors(model.encode_texts(BACKGROUND))
    if scale := Scale.fit(background, (vectors for _, vectors in table.vectors())):
        table.set_fact("relevance", {"of": state, **dataclasses.asdict(scale)})


def _missing(
    address: str, states: dict[str, State], roots: set[Path], files: list[VideoFile], unread: set[Path], prune: bool
) -> tuple[list[str], list[str]]:
    """Return the videos to remove, and the folders that contain none of their videos as problems."""
    present = {file.id for file in files}
    indexed = {video for video, (_, read) in states.items() if read}
    gone = {
        video: file.path
        for video, (file, _) in states.items()
        if video not in present and within(file.path, roots) and not within(file.path, unread)
    }
    there = [file.path for file in files if prune or file.id in indexed]
    problems: list[str] = []
    for root in sorted(roots):
        inside = {video for video, path in gone.items() if within(path, {root})}
        count = len(indexed & inside)
        if count and not any(within(path, {root}) for path in there):
            problems.append(
                f"{root}: contains none of its {count} indexed videos, which stay in the index. Mount its disk, "
                "or, if the videos moved within the folder, pass --prune"
            )
            gone = {video: path for video, path in gone.items() if video not in inside}
    lost = sorted(path for video, path in gone.items() if video in indexed)
    if len(lost) > max(1, REMOVED_WITHOUT_PRUNE * len(indexed)) and not prune:
        raise SearchError(
            f"{len(lost)} of the {len(indexed)} videos in {address} are missing from its folders, such as {lost[0]}. "
            "Restore them, or pass --prune to remove them from the index."
        )
    return list(gone), problems


def _attempt(file: VideoFile, read: Callable[[], T]) -> T | str:
    """Return the result of `read`, or the reason if the file cannot be read."""
    try:
        result = read()
        state = file.path.stat()
    except MediaError as error:
        return error.reason
    except OSError as error:
        return error.strerror or str(error) if file.path.is_file() else "it is missing"
    is_same = (state.st_size, state.st_mtime_ns) == (file.size, file.modified)
    return result if is_same else "it changed while it was read. Run tvr index again."


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items while the next one, and no further one, is made in a thread."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item
