"""Indexing of videos. Only new, changed, and deleted files are processed; if it is killed, one batch is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

from tvr_lightning.data.batch import Media
from tvr_lightning.data.recover_captions import read_captions
from tvr_lightning.encoders.captioner import load_captioner
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.errors import UserError
from tvr_lightning.files import held
from tvr_lightning.media.opening import MediaError
from tvr_lightning.media.read_many import Unread, read_many
from tvr_lightning.media.video import probe
from tvr_lightning.progress import progress_bar
from tvr_lightning.search.captions import describe_videos, join_captions
from tvr_lightning.search.catalog import FILE, Catalog, Entry, SpanEntry
from tvr_lightning.search.errors import BusyError, RefusedError, SearchError
from tvr_lightning.search.files import FolderScan, VideoFile, find_videos, resolve_roots
from tvr_lightning.search.long_video import LongVideo, SegmentClips
from tvr_lightning.search.pictures import FramePreparer
from tvr_lightning.search.places import choose_store, forget, identify, known_roots, remember, remembered
from tvr_lightning.search.relevance import BACKGROUND, Scale, best_cosines
from tvr_lightning.search.scorer import Clip, Scorer, ScorerSource
from tvr_lightning.search.segments import Segments
from tvr_lightning.search.vectors import LANCE_FOLDER, VectorStore, follow, open_vectors
from tvr_lightning.store import differences

T = TypeVar("T")
REMOVED_WITHOUT_PRUNE = 0.05
"""Largest share of an index that is removed without `prune`; a single video always is."""
LOCK = "writer.lock"
VIDEOS_PER_FOLLOW = 256
"""How many videos are written before the vector store is brought in step and finds them: these, or a sixteenth of a
large index, since comparing the two costs as much as the index has videos."""


@dataclass
class IndexReport:
    """Report of an indexing run.

    Attributes:
        added: Number of new and changed videos. kept: Number of unchanged videos.
        removed: Number of videos removed from the index.
        skipped: "path: reason" of all unreadable videos.
        problems: "path: reason" of folders without permission and links that lead out.
        total: Number of videos in the index.
        captioned: Number of videos with captions.
    """

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
    store: str | None = None,
    bank: Sequence[str] | None = None,
    batch_size: int = 16,
    workers: int = 2,
    device: str = "cpu",
    progress: bool = True,
    captions: str | Path | None = None,
    captioner: str | None = None,
    trust: Sequence[str] = (),
    segments: Segments | None = None,
    prune: bool = False,
) -> IndexReport:
    """Index videos, or bring an index up to date.

    Args:
        videos: Files and folders; by default those of the index.
        out: Folder of the index.
        scorers: Methods, by default those of the index. The vectors of the first one find the candidates.
        store: Vector store (`vectors.STORES`), by default that of the index, for a new one LanceDB.
        bank: Sample queries for the normalization of scores. None keeps those of the index.
        batch_size: Number of videos per pass through an encoder.
        workers: Number of threads that decode.
        device: Device for the encoders.
        progress: Whether to show a progress bar.
        captions: File with captions (`data.recover_captions`). None keeps those of the index.
        captioner: Vision-language model that describes the videos instead, a hub name or a folder.
        trust: Modules whose classes the checkpoints may also name. Their code is run.
        segments: Rule for cutting long videos, by default that of the index.
        prune: Permission to remove videos that are missing, even if they are more than 5 % of the index.

    Returns:
        Numbers of videos, and the unreadable videos with reasons.

    Raises:
        SearchError: There is nothing to index, weights or options differ from those of the index, an option is out of
            range, or the disk is full. Indexed videos are kept.
        RefusedError: `out` contains files that are not part of an index, or many videos are missing without `prune`.
        BusyError: Another process is writing the index.
        MissingAssetError: The captions file or the captioner's weights are missing.
    """
    folder = Path(out)
    _require_own(folder)
    if captions is not None and captioner is not None:
        raise SearchError(
            "captions and captioner conflict. Pass either a captions file or a model that describes the videos."
        )
    if captions is not None:
        read_captions(Path(captions))  # what is wrong with it is better known before hours of indexing
    describer = None if captioner is None else load_captioner(captioner, device)
    if batch_size < 1 or workers < 1:
        raise SearchError(f"batch_size ({batch_size}) and workers ({workers}) must be at least 1")
    given = resolve_roots(videos) if videos else []
    with _unwritable(folder), _catalog(folder) as catalog:
        identify(catalog)
        places = remembered(catalog)
        roots, new = catalog.fact("roots") or [], catalog.fact("scorers") is None
        walked = given or resolve_roots(known_roots(catalog, places))
        models = _scorers(catalog, scorers, device, trust)
        how = _segments(catalog, segments)
        name = choose_store(catalog, store)
        vectors = open_vectors(name, catalog)
        with contextlib.closing(vectors):
            catalog.set_fact("store", name)
            catalog.set_fact("roots", sorted({*roots, *map(str, given)}))
            places.videos = sorted({*places.videos, *map(str, given)})
            places.store = name if "://" in name else None
            if bank is not None:
                catalog.set_fact("bank", [line for line in bank if line.strip()])
            run = _Run(catalog, vectors, models, how, batch_size, workers)
            unkept = remember(catalog, places)
            report = run.bring_up_to_date(walked, progress, prune)
            if new and not report.total:
                more = f" and {len(report.skipped) - 3} more" if len(report.skipped) > 3 else ""
                raise SearchError(
                    f"no index was created, since no video could be read: {'; '.join(report.skipped[:3])}{more}"
                )
            covered = [Path(root) for root in catalog.fact("roots")]
            if describer is not None:
                joined = describe_videos(catalog, describer, covered, places, progress)
            else:
                joined = join_captions(catalog, None if captions is None else Path(captions), covered, places)
            unkept = remember(catalog, places) or unkept
            report.captioned = joined.captioned
            report.problems += joined.problems + ([unkept] if unkept else [])
            return report


def load_scorers(facts: Sequence[dict[str, Any]], device: str, trust: Sequence[str] = ()) -> dict[str, Scorer]:
    """Load the scorers that an index was made with, by name.

    Args:
        facts: what the index says of them.
        device: where they run.
        trust: modules whose classes their checkpoints may name besides this package's.

    Raises:
        SearchError: the weights are not those that the index was made with; both fingerprints are shown.
    """
    models: dict[str, Scorer] = {}
    for fact in facts:
        try:
            model = Scorer(ScorerSource(**fact["source"]), device, trust)
        except MissingWeightsError as error:
            raise SearchError(f"{error.looked_for}. The index was created with these weights. Restore them.") from error
        differing = differences(fact["fingerprint"], model.fingerprint, "the index")
        if differing:
            raise SearchError(
                f"{fact['source']['checkpoint'] or fact['source']['weights']} has changed since the index was created: "
                f"{differing}. Restore the previous weights, or index the videos into a new folder."
            )
        models[fact["name"]] = model
    return models


def _scorers(catalog: Catalog, sources: Sequence[ScorerSource], device: str, trust: Sequence[str]) -> dict[str, Scorer]:
    """Load the wanted scorers and check that they are the index's; those of a new index are noted in it."""
    facts = catalog.fact("scorers")
    if not sources:
        if facts is None:
            raise SearchError(f"{catalog.folder}: a new index needs a checkpoint or weights")
        return load_scorers(facts, device, trust)
    models: dict[str, Scorer] = {}
    for source in sources:
        try:
            model = Scorer(source, device, trust)
        except MissingWeightsError as error:
            raise SearchError(
                f"{error.looked_for}. Name a checkpoint with --ckpt_path FILE, or a file of weights of "
                f"{source.architecture} with --weights FILE (OpenAI archive or state dict, open_clip .pt or "
                ".safetensors). To only try out the search, use --weights none: random weights, meaningless results."
            ) from error
        same = sum(name.partition("-")[0] == model.name for name in models)
        models[f"{model.name}-{same + 1}" if same else model.name] = model
    if facts is None:
        listed = [
            {"name": n, "fingerprint": m.fingerprint, "source": _absolute(dataclasses.asdict(m.source))}
            for n, m in models.items()
        ]
        catalog.set_fact("scorers", listed)
        return models
    before = {fact["name"]: fact["fingerprint"] for fact in facts}
    found = f"it was created with {', '.join(before)}, but you named {', '.join(models)}"
    if list(before) == list(models):
        found = "; ".join(filter(None, (differences(before[n], m.fingerprint, "the index") for n, m in models.items())))
    if found:
        raise SearchError(
            f"{catalog.folder}: {found}. Index into a new folder, or drop --ckpt_path and --weights to use "
            "those of the index."
        )
    return models


def _segments(catalog: Catalog, given: Segments | None) -> Segments:
    """Return how an index's long videos are cut; other ways than those it was made with are refused."""
    known = catalog.fact("segments")
    if known is None:
        catalog.set_fact("segments", dataclasses.asdict(given or Segments()))
        return given or Segments()
    if given is not None and given != Segments(**known):
        raise SearchError(
            f"{catalog.folder}: its videos are cut into {known['kind']} of {known['length']:g} s, overlapping by "
            f"{known['overlap']:g} s. Index into a new folder, or drop the options of segments."
        )
    return Segments(**known)


def _absolute(source: dict[str, Any]) -> dict[str, Any]:
    if source["checkpoint"]:
        source["checkpoint"] = os.path.realpath(source["checkpoint"])
    return source


@contextlib.contextmanager
def _unwritable(folder: Path) -> Iterator[None]:
    """Say in a sentence that the disk is full or not writable."""
    try:
        yield
    except UserError:
        raise
    except (sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        where = error.filename if isinstance(error, OSError) and error.filename else folder
        raise SearchError(
            f"{where} cannot be written ({reason}). The disk may be full, or the file size limited. Finished batches "
            "are kept. Free disk space and rerun tvr index to resume."
        ) from error


def _require_own(folder: Path) -> None:
    """Check that a folder is an index, empty, or absent.

    Raises:
        RefusedError: it contains other files.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(names - {LOCK})
    if others and FILE not in names:
        listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise RefusedError(
            f"{folder} contains files that are not part of an index ({listed}). "
            "Choose a new or empty folder with --out."
        )


@contextlib.contextmanager
def _catalog(folder: Path) -> Iterator[Catalog]:
    """Lock an index and open its catalog; if it is new and ends without a video, remove what was created.

    Raises:
        BusyError: another process writes the index.
        SearchError: the folder cannot be written.
    """
    created_folder = not folder.exists()
    busy = BusyError(f"Another process is writing the index {folder}. Wait for it or stop it.")
    with contextlib.ExitStack() as lock:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(held(folder / LOCK, busy, "do not start a second tvr index with the same --out"))
        except OSError as error:
            raise SearchError(f"{folder} cannot be written: {error.strerror or error}") from error
        new = dead = not (folder / FILE).exists()
        try:
            with contextlib.closing(Catalog(folder, create=True)) as catalog:
                dead = False
                try:
                    yield catalog
                finally:
                    dead = new and not catalog.count()
                    if dead:
                        forget(catalog)
        finally:
            if dead:
                shutil.rmtree(folder / LANCE_FOLDER, ignore_errors=True)
                for name in (FILE, *(f"{FILE}-{journal}" for journal in ("wal", "shm", "journal")), LOCK):
                    (folder / name).unlink(missing_ok=True)
                if created_folder:
                    with contextlib.suppress(OSError):  # it contains files that others wrote meanwhile
                        folder.rmdir()


@dataclass
class _Read:
    """A video that is indexed as one segment."""

    file: VideoFile
    segment: SegmentClips
    size: tuple[int, int]


@dataclass
class _Long:
    """A file that is to be read in segments, and how many seconds it lasts."""

    file: VideoFile
    seconds: float


class _Run:
    """One run over some roots: compares them with the catalog, and writes what differs batch by batch."""

    def __init__(
        self,
        catalog: Catalog,
        vectors: VectorStore,
        models: dict[str, Scorer],
        how: Segments,
        batch_size: int,
        workers: int,
    ) -> None:
        self.catalog, self.vectors, self.models, self.how = catalog, vectors, models, how
        self.batch_size, self.workers = batch_size, workers

    def bring_up_to_date(self, roots: Sequence[Path], shown: bool, prune: bool) -> IndexReport:
        """Write what is new or changed below the roots, and forget what is gone.

        Raises:
            RefusedError: too many videos are gone, and `prune` is off; nothing is changed.
        """
        found = find_videos(roots)
        known = self.catalog.known()
        if not found.files and not known:
            looked = ", ".join(map(str, roots))
            raise SearchError(f"no videos in {looked}" + "".join(f"; {problem}" for problem in found.problems))
        there = self.catalog.read()
        gone = self._gone(roots, found, {video for video, key in known.items() if key in there}, prune)
        if gone:
            self.catalog.remove(gone)
        pending = [file for file in found.files if known.get(file.id) != file.key]
        kept = sum(known.get(file.id) == file.key and file.key in there for file in found.files)
        report = IndexReport(kept=kept, removed=len(gone), problems=found.problems)
        follow(self.vectors, self.catalog)
        cuts = [pending[start : start + self.batch_size] for start in range(0, len(pending), self.batch_size)]
        with progress_bar(shown) as progress:
            task = progress.add_task("videos", total=len(found.files), completed=len(found.files) - len(pending))
            since = 0
            for batch in read_many(cuts, self._read, list, workers=self.workers, threads=True):
                long = [read for read in batch if isinstance(read, _Long)]
                report.added += self._write([read for read in batch if not isinstance(read, _Long)])
                progress.advance(task, len(batch) - len(long))
                for each in long:
                    report.added += self._write_long(each, progress)
                    progress.advance(task)
                since += len(batch)
                if since >= max(VIDEOS_PER_FOLLOW, (kept + report.added) // 16):
                    follow(self.vectors, self.catalog)
                    since = 0
        follow(self.vectors, self.catalog)
        self.vectors.finish()
        self._measure()
        report.skipped = self.catalog.skipped()
        report.total = self.catalog.count()
        return report

    def _measure(self) -> None:
        """Note where the scale of relevance begins, once the index is another one."""
        keys = sorted(self.catalog.keys())
        state = [len(keys), sum(keys) % 2**53]
        known = self.catalog.fact("relevance")
        if known is not None and known["of"] == state:
            return
        model = next(iter(self.models.values()))
        background = model.text_vectors(model.encode_texts(list(BACKGROUND)))
        blocks = (self.catalog.vectors(keys[start : start + 4096])[1] for start in range(0, len(keys), 4096))
        best = best_cosines(background, blocks)
        if best is not None:
            facts = {"of": state, **dataclasses.asdict(Scale.of(best))}
            self.catalog.set_fact("relevance", facts)

    def _gone(self, roots: Sequence[Path], found: FolderScan, indexed: set[str], prune: bool) -> list[str]:
        """List the videos to remove; a folder that contains none of its videos is a problem and removes nothing."""

        def below(path: Path, folders: Sequence[Path]) -> bool:
            return any(path == folder or folder in path.parents for folder in folders)

        def around(files: Iterable[Path]) -> set[Path]:
            return {path for file in files for path in (file, *file.parents)}

        paths, present = self.catalog.paths(), {file.id for file in found.files}
        missing = [paths[v] for v in indexed if v not in present and not below(paths[v], found.unread)]
        kept = list(found.unread)
        if missing:
            holding = around(file.path for file in found.files if prune or file.id in indexed)
            empty = (around(missing) - holding).intersection(roots)
            for root in sorted(empty):
                count = sum(below(path, [root]) for path in missing)
                kept.append(root)
                found.problems.append(
                    f"{root}: contains none of its {count} indexed videos, which stay in the index. Mount its disk, "
                    "or, if the videos moved within the folder, pass --prune"
                )
        gone = [v for v, path in paths.items() if v not in present and below(path, roots) and not below(path, kept)]
        lost = sorted(paths[video] for video in indexed.intersection(gone))
        if len(lost) > max(1, REMOVED_WITHOUT_PRUNE * len(indexed)) and not prune:
            raise RefusedError(
                f"{len(lost)} of the {len(indexed)} videos in {self.catalog.folder} are missing from its folders, such "
                f"as {lost[0]}. Restore them, or pass --prune to remove them from the index."
            )
        return gone

    def _read(self, file: VideoFile) -> _Read | _Long:
        clips: dict[tuple[object, ...], Clip] = {}
        try:
            if self.how.kind != "none" and (seconds := probe(file.path).duration) > self.how.length:
                return _Long(file, seconds)
            first = next(iter(self.models.values()))
            keeping = FramePreparer(first.preparation)
            for model in self.models.values():
                if model.reading not in clips:
                    clips[model.reading] = model.read(file.path, keeping if model is first else None)
            shown = clips[first.reading]
            mask = shown.media.frame_mask[0]
            pixels, times = shown.media.pixels[0][mask], shown.times[mask].tolist()
            pictures = {time: keeping.of(frame) for time, frame in zip(times, pixels, strict=True)}
            _require_unchanged(file)
        except OSError as error:
            raise MediaError(file.path, error.strerror or str(error)) from error
        assert shown.media.duration is not None
        by_name = {name: clips[model.reading] for name, model in self.models.items()}
        return _Read(file, SegmentClips(0.0, float(shown.media.duration[0]), by_name, pictures), keeping.size)

    def _write(self, batch: Sequence[_Read | Unread[VideoFile]]) -> int:
        good = [read for read in batch if not isinstance(read, Unread)]
        spans = self._encoded([read.segment for read in good])[0] if good else []
        entries = [
            Entry(read.file, span.end, [span], read.segment.pictures, read.size)
            for read, span in zip(good, spans, strict=True)
        ]
        self.catalog.write(entries, [(read.item, read.reason) for read in batch if isinstance(read, Unread)])
        return len(good)

    def _write_long(self, long: _Long, progress: Progress) -> int:
        """Write a video segment by segment, visible once it is complete; return how many were written, 1 or 0."""
        file, video = long.file, LongVideo(long.file.path, self.models, self.how)
        bar = progress.add_task(file.path.name, total=round(long.seconds))

        def blocks() -> Iterator[tuple[list[SpanEntry], dict[float, bytes]]]:
            for block in ahead(video.segments(), self.batch_size):
                yield self._encoded(block)
                progress.update(bar, completed=min(round(block[-1].end), round(long.seconds)))

        def facts() -> tuple[float, tuple[int, int]]:
            _require_unchanged(file)
            return video.end, video.size

        try:
            self.catalog.write_blocks(file, blocks(), facts)
        except (MediaError, OSError) as error:
            reason = error.reason if isinstance(error, MediaError) else error.strerror or str(error)
            if isinstance(error, OSError) and not file.path.is_file():
                reason = "it is missing"
            self.catalog.write([], [(file, reason)])
            return 0
        finally:
            progress.remove_task(bar)
        return 1

    def _encoded(self, block: list[SegmentClips]) -> tuple[list[SpanEntry], dict[float, bytes]]:
        features = {
            name: model.encode_videos(Media.cat([each.clips[name].media for each in block]))
            for name, model in self.models.items()
        }
        first = next(iter(self.models))
        vectors = self.models[first].video_vectors(features[first])
        spans = [
            SpanEntry(
                each.start,
                each.end,
                vectors[row],
                {name: found[row : row + 1] for name, found in features.items()},
                {name: clip.times for name, clip in each.clips.items()},
            )
            for row, each in enumerate(block)
        ]
        return spans, {time: jpeg for each in block for time, jpeg in each.pictures.items()}


def _require_unchanged(file: VideoFile) -> None:
    state = file.path.stat()
    if (state.st_size, state.st_mtime_ns) != (file.size, file.modified):
        raise MediaError(file.path, "it changed while it was read. Run tvr index again.")


def ahead(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield blocks of items; the next block is made while one is worked on, and no further one.

    Args:
        items: what takes time to make.
        size: of a block.
    """
    with ThreadPoolExecutor(1) as pool:

        def take() -> list[T]:
            return list(itertools.islice(items, size))

        following = pool.submit(take)
        while block := following.result():
            following = pool.submit(take)
            yield block
