"""Indexing of videos. Only new, changed, and deleted files are processed; if it is killed, one batch is lost."""

import contextlib
import dataclasses
import itertools
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.markup import escape
from rich.progress import Progress

from tvr_lightning.data.batch import Media
from tvr_lightning.data.recover_captions import RecoverCaptions, read_captions
from tvr_lightning.files import explain_write_errors, file_lock
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.video import probe
from tvr_lightning.progress import progress_bar
from tvr_lightning.search.catalog import FILE, Catalog, VideoRow
from tvr_lightning.search.engine import load_scorers
from tvr_lightning.search.errors import BusyError, SearchError
from tvr_lightning.search.files import NamedPaths, VideoFile, find_videos, resolve_roots, within
from tvr_lightning.search.relevance import BACKGROUND, Scale
from tvr_lightning.search.results import printable
from tvr_lightning.search.scorer import Scorer, ScorerSource
from tvr_lightning.search.segments import SegmentClips, Segments, read_segments, read_whole
from tvr_lightning.search.vectors import LANCE_FOLDER, LanceStore, update_vectors

T = TypeVar("T")
REMOVED_WITHOUT_PRUNE = 0.05
"""Maximum share of an index that is removed without `prune`; a single video always is."""
LOCK = "writer.lock"
VIDEOS_PER_UPDATE = 256
"""Number of videos after which the vector store is updated. For a large index it is a sixteenth of its videos, since
the cost of comparing the store with the catalog grows with the index."""


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
) -> IndexReport:
    """Index videos, or bring an index up to date. None keeps what the index records.

    Args:
        videos: Files and folders; by default those of the index.
        out: Folder of the index.
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

    Raises:
        SearchError: There is nothing to index, options differ from those of the index, `out` contains other files, many
            videos are missing without `prune`, or the disk is full.
    """
    folder = Path(out)
    described = None if captions is None else read_captions(Path(captions))  # before hours of indexing
    given = resolve_roots(videos) if videos else []
    with _open_catalog(folder) as catalog:
        named, roots, new = NamedPaths.load(catalog.identity), catalog.roots, catalog.fact("scorers") is None
        if not given and (strange := [str(root) for root in roots if str(root) not in named.videos]):
            raise SearchError(
                f"{folder} lists {', '.join(strange)}, which you have not named here. To index them, run tvr index "
                f"{shlex.join([*strange, '--out', str(folder)])}"
            )
        walked = given or resolve_roots(named.videos)
        models = load_scorers(catalog, scorers, device, trust)
        known = catalog.fact("segments")
        rule = segments or Segments(**(known or {}))
        if known and rule != Segments(**known):
            raise SearchError(
                f"{folder}: its videos are cut into {known['kind']} of {known['length']:g} s, overlapping by "
                f"{known['overlap']:g} s. Index into a new folder, or drop the options of segments."
            )
        catalog.set_fact("segments", dataclasses.asdict(rule))
        catalog.set_fact("roots", sorted({*map(str, roots), *map(str, given)}))
        named.videos = sorted({*named.videos, *map(str, given)})
        if bank is not None:
            catalog.set_fact("bank", [line for line in bank if line.strip()])
        report = _Run(catalog, LanceStore(folder), models, rule, batch_size, workers).update(walked, progress, prune)
        if new and not report.total:
            reasons = "; ".join(report.skipped[:3])
            raise SearchError(f"no index was created, since no video could be read: {reasons}")
        report.problems += _join_captions(catalog, described, named)
        report.problems += named.save(catalog.identity)
        report.captioned = catalog.captioned()
        return report


@contextlib.contextmanager
def _open_catalog(folder: Path) -> Iterator[Catalog]:
    """Lock an index and open its catalog; remove what was created if a new index ends without a video."""
    others = sorted({path.name for path in folder.iterdir()} - {LOCK}) if folder.is_dir() else []
    new, created_folder = FILE not in others, not folder.exists()
    if others and new:
        raise SearchError(
            f"{folder} contains files that are not part of an index ({', '.join(others[:3])}). Choose a new or empty "
            "folder with --out."
        )
    with explain_write_errors(folder, "Finished batches are kept.", "tvr index."):
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / LOCK, f"the index {folder}", BusyError), contextlib.ExitStack() as undo:
            if new:
                undo.callback(_discard, folder, created_folder)
            with contextlib.closing(Catalog(folder, create=True)) as catalog:
                try:
                    yield catalog
                finally:
                    if catalog.count():
                        undo.pop_all()


def _discard(folder: Path, created: bool) -> None:
    """Remove the files of an index without videos, and the folder if it was created and contains nothing else."""
    shutil.rmtree(folder / LANCE_FOLDER, ignore_errors=True)
    for name in (FILE, f"{FILE}-journal", LOCK):
        (folder / name).unlink(missing_ok=True)
    if created:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _join_captions(catalog: Catalog, given: RecoverCaptions | None, named: NamedPaths) -> list[str]:
    """Set the captions of the videos from the given file or the one that the user named before; return problems."""
    known, roots = catalog.fact("captions"), catalog.roots
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

    found = {video.id: lines for video in catalog.videos() if (lines := texts(video))}
    if not found and given is not None and catalog.count():
        raise SearchError(
            f"{described.path} describes none of the index's videos, but others, such as "
            f"{', '.join(list(described.descriptions)[:3])}. Name videos by their path in the indexed folder or by "
            "their file name."
        )
    catalog.set_captions(found)
    named.captions = str(described.path.resolve())
    catalog.set_fact("captions", named.captions)
    return []


@dataclass
class _Run:
    """One run over some roots."""

    catalog: Catalog
    vectors: LanceStore
    models: dict[str, Scorer]
    rule: Segments
    batch_size: int
    workers: int

    def update(self, roots: Sequence[Path], shown: bool, prune: bool) -> IndexReport:
        """Write new and changed videos, and remove missing ones."""
        states, (files, problems, unread) = self.catalog.states(), find_videos(roots)
        if not files and not states:
            raise SearchError("; ".join([f"no videos in {', '.join(map(str, roots))}", *problems]))
        missing = self._missing(roots, files, problems, unread, prune)
        if missing:
            with self.catalog.change():
                self.catalog.remove(missing)
        unchanged = {file.id for file in files if file.id in states and states[file.id][0] == file.key}
        pending = [file for file in files if file.id not in unchanged]
        kept = sum(states[video][2] for video in unchanged)
        report = IndexReport(kept=kept, removed=len(missing), problems=problems)
        update_vectors(self.vectors, self.catalog)
        groups = [pending[start : start + self.batch_size] for start in range(0, len(pending), self.batch_size)]
        with progress_bar(shown) as progress, ThreadPoolExecutor(self.workers) as pool:
            task = progress.add_task("videos", total=len(files), completed=len(unchanged))
            since = 0
            for group in read_ahead([*zip(group, pool.map(self._read, group), strict=True)] for group in groups):
                whole = [(file, read) for file, read in group if isinstance(read, SegmentClips)]
                with self.catalog.change():
                    self.catalog.remove([file.id for file, _ in whole])
                    self._add([(file, 0, segment) for file, segment in whole])
                    for file, segment in whole:
                        self.catalog.add_video(file, segment.end, segment.size)
                report.added += len(whole)
                for file, read in group:
                    if isinstance(read, str):
                        self.catalog.skip(file, read)
                    elif read is None:
                        report.added += self._write_long(file, progress)
                    progress.advance(task)
                since += len(group)
                if since >= max(VIDEOS_PER_UPDATE, (kept + report.added) // 16):
                    update_vectors(self.vectors, self.catalog)
                    since = 0
        update_vectors(self.vectors, self.catalog)
        self.vectors.finish()
        self._calibrate()
        report.skipped, report.total = self.catalog.skipped(), self.catalog.count()
        return report

    def _calibrate(self) -> None:
        """Set the scale of relevance if the index has changed."""
        keys = sorted(self.catalog.keys())
        state, known = [len(keys), sum(keys) % 2**53], self.catalog.fact("relevance")
        if known is not None and known["of"] == state:
            return
        model = next(iter(self.models.values()))
        background = model.text_vectors(model.encode_texts(BACKGROUND))
        blocks = (self.catalog.vectors(keys[start : start + 4096])[1] for start in range(0, len(keys), 4096))
        if scale := Scale.fit(background, blocks):
            self.catalog.set_fact("relevance", {"of": state, **dataclasses.asdict(scale)})

    def _missing(
        self, roots: Sequence[Path], files: Sequence[VideoFile], problems: list[str], unread: set[Path], prune: bool
    ) -> list[str]:
        """Return the videos to remove; a folder that contains none of its videos is a problem and removes nothing."""
        states, present = self.catalog.states(), {file.id for file in files}
        gone = {
            video: path
            for video, (_, path, _) in states.items()
            if video not in present and within(path, set(roots)) and not within(path, unread)
        }
        indexed = {video for video, (_, _, read) in states.items() if read}
        there = [file.path for file in files if prune or file.id in indexed]
        for root in sorted(set(roots)):
            inside = [video for video, path in gone.items() if within(path, {root})]
            count = len(indexed.intersection(inside))
            if count and not any(within(path, {root}) for path in there):
                problems.append(
                    f"{root}: contains none of its {count} indexed videos, which stay in the index. Mount its disk, "
                    "or, if the videos moved within the folder, pass --prune"
                )
                gone = {video: path for video, path in gone.items() if video not in inside}
        lost = sorted(path for video, path in gone.items() if video in indexed)
        if len(lost) > max(1, REMOVED_WITHOUT_PRUNE * len(indexed)) and not prune:
            raise SearchError(
                f"{len(lost)} of the {len(indexed)} videos in {self.catalog.folder} are missing from its folders, such "
                f"as {lost[0]}. Restore them, or pass --prune to remove them from the index."
            )
        return list(gone)

    def _read(self, file: VideoFile) -> SegmentClips | str | None:
        """Read a video as one segment. Return the reason if it cannot be read, and None for a longer video."""
        try:
            if self.rule.kind != "none" and probe(file.path).duration > self.rule.length:
                return None
            segment = read_whole(file.path, self.models)
            _require_unchanged(file)
        except (MediaError, OSError) as error:
            return _reason(file, error)
        return segment

    def _add(self, block: Sequence[tuple[VideoFile, int, SegmentClips]]) -> None:
        """Encode some segments, given with their video and number, and add them to the catalog."""
        if not block:
            return
        features = {
            name: model.encode_videos(Media.cat([segment.clips[name].media for *_, segment in block]))
            for name, model in self.models.items()
        }
        first = next(iter(self.models))
        vectors = self.models[first].video_vectors(features[first])
        for row, (file, place, segment) in enumerate(block):
            of_segment = {name: found[row : row + 1] for name, found in features.items()}
            self.catalog.add_span(file, place, segment, vectors[row], of_segment)

    def _write_long(self, file: VideoFile, progress: Progress) -> int:
        """Write a video segment by segment, visible once it is complete; return the number of videos, 1 or 0."""
        bar = progress.add_task(escape(printable(file.path.name)), total=0)
        try:
            duration = probe(file.path).duration
            progress.update(bar, total=round(duration))
            with self.catalog.change():
                self.catalog.remove([file.id])
                segments = enumerate(read_segments(file.path, self.models, self.rule))
                for block in read_ahead(iter(lambda: list(itertools.islice(segments, self.batch_size)), [])):
                    self._add([(file, place, segment) for place, segment in block])
                    last = block[-1][1]
                    progress.update(bar, completed=round(min(last.end, duration)))
                _require_unchanged(file)
                self.catalog.add_video(file, duration, last.size)
        except (MediaError, OSError) as error:
            self.catalog.skip(file, _reason(file, error))
            return 0
        finally:
            progress.remove_task(bar)
        return 1


def _require_unchanged(file: VideoFile) -> None:
    state = file.path.stat()
    if (state.st_size, state.st_mtime_ns) != (file.size, file.modified):
        raise MediaError(file.path, "it changed while it was read. Run tvr index again.")


def _reason(file: VideoFile, error: MediaError | OSError) -> str:
    if isinstance(error, MediaError):
        return error.reason
    return error.strerror or str(error) if file.path.is_file() else "it is missing"


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items while the next one, and no further one, is made in a thread."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item
