"""`tvr index`, `tvr search` and `tvr serve`; their signatures and docstrings are the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tvr_lightning.media.sampling import FrameSampling
from tvr_lightning.places import File, Folder, NewFolder, Place
from tvr_lightning.progress import shown
from tvr_lightning.ranges import Count, Range, Share
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.results import Answer, Normalize, SegmentKind, clock

CAPTIONS_SHOWN = 2
Index = Annotated[Path, Place("folder", "make one with tvr index VIDEOS... --out {path}")]


def run_index(
    videos: Sequence[Annotated[Path, Place("either")]] = (),
    out: NewFolder = Path("index"),
    ckpt_path: list[File] | None = None,
    weights: str | None = None,
    architecture: str = "ViT-B-32",
    frames: Count = 12,
    sampling: FrameSampling = "one-fps-uniform",
    seed: int = 0,
    store: str | None = None,
    bank: File | None = None,
    captions: File | None = None,
    captioner: str | None = None,
    trust: list[str] | None = None,
    segments: SegmentKind | None = None,
    segment_length: float | None = None,
    segment_overlap: float | None = None,
    batch_size: Count = 16,
    num_workers: Count = 2,
    device: str | None = None,
    prune: bool = False,
) -> int:
    """Make videos searchable, or update an index: only new, changed, and deleted files are processed.

    Args:
        videos: video files and folders; those already in the index by default.
        out: folder of the index.
        ckpt_path: checkpoints of one or more methods; the vectors of the first find candidates, and each can rank them.
        weights: weights of a CLIP with averaged frames, without a checkpoint: a file, an open_clip tag, or none.
        architecture: open_clip name of that CLIP.
        frames: number of frames per video, without a checkpoint.
        sampling: rule for selecting the frames, without a checkpoint.
        seed: seed for random weights.
        store: lancedb, qdrant://HOST:PORT, or an address such as s3://BUCKET/PATH.
        bank: text file with one query per line, for --normalize sinkhorn and for finding the texts of a video.
        captions: file with descriptions of the videos: parquet from `tvr caption`, or .csv or .jsonl with its columns.
        captioner: vision-language model that describes the videos instead: a hub name or a folder.
        trust: module whose classes the checkpoints may name, can be repeated; its code is run.
        segments: rule for cutting videos longer than segment_length: shots (by default), windows, or none.
        segment_length: length of a window, and maximum length of a shot, in seconds; 20 by default.
        segment_overlap: overlap of windows in seconds; 0 by default.
        batch_size: number of videos per pass through an encoder.
        num_workers: number of threads that decode.
        device: device for the encoders; a GPU by default if available.
        prune: removal of missing videos even if they are more than 5 % of the index, or moved within their folder.
    """
    with shown("index: loading"):
        from tvr_lightning.search.indexing import index
        from tvr_lightning.search.scorer import ScorerSource
        from tvr_lightning.search.segments import LENGTH, Segments

    if ckpt_path and weights:
        raise SearchError(
            "--ckpt_path and --weights conflict, since a checkpoint contains its own weights. Drop one of them."
        )
    sources = [ScorerSource(checkpoint=str(path)) for path in ckpt_path or []]
    new = not (out / "catalog.sqlite").is_file()
    if not sources and (weights or new):
        sources = [ScorerSource(None, architecture, weights or "openai", seed, frames, sampling)]
        if weights == "none":
            print(
                "WARNING: The weights are RANDOM, so results are meaningless. Use --ckpt_path or --weights.",
                file=sys.stderr,
            )
    try:
        queries = None if bank is None else bank.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SearchError(f"{bank}: cannot be read as text: {error}") from error
    given = (segments, segment_length, segment_overlap) != (None, None, None)
    length = LENGTH if segment_length is None else segment_length
    wanted = Segments(segments or "shots", length, segment_overlap or 0.0) if given else None
    chosen = _device(device)
    report = index(
        videos,
        out,
        sources,
        store,
        queries,
        batch_size,
        num_workers,
        chosen,
        captions=captions,
        captioner=captioner,
        trust=trust or (),
        segments=wanted,
        prune=prune,
    )
    for line in report.lines():
        print(line)
    if report.total:
        print(f'Wrote {out}. Next: tvr search "a query" --index {out}, or tvr serve --index {out}')
        return 0
    print(f"{out} contains no videos, so there is nothing to search.")
    return 1


def run_search(
    query: Sequence[str] = (),
    index: Index = Path("index"),
    video: File | None = None,
    image: File | None = None,
    top: Count = 10,
    rerank: str | None = None,
    candidates: Count = 256,
    normalize: Normalize = "none",
    folder: str | None = None,
    min_relevance: Share | None = None,
    json: bool = False,
    store: str | None = None,
    trust: list[str] | None = None,
    device: str | None = None,
) -> int:
    """Find videos in an index by text or by an example.

    Args:
        query: description of the videos to find.
        index: folder of the index.
        video: example clip instead of or in addition to text.
        image: example image instead of or in addition to text.
        top: number of results.
        rerank: scorer that ranks the candidates, such as gare, tcmgc or gaid; none keeps the order of the vectors.
        candidates: number of videos that this scorer ranks.
        normalize: sinkhorn keeps hub videos from dominating the results; the index needs a --bank.
        folder: folder whose videos may be found, relative to an indexed folder.
        min_relevance: minimum relevance of results, from 0 to 1: the share of unrelated queries that would score lower.
        json: print JSON.
        store: address of the index's vectors, such as s3://BUCKET/PATH, for an index that another user made.
        trust: module whose classes the index's checkpoints may name, can be repeated; its code is run.
        device: device for the methods; a GPU by default if available.
    """
    text, example = " ".join(query), video or image
    if video and image:
        raise SearchError("Use one example, either --video or --image.")
    if example and not text and (rerank is not None or normalize != "none" or min_relevance is not None):
        raise SearchError("Examples are compared frame by frame. Drop --rerank, --normalize, and --min_relevance.")
    with shown("search: opening the index; tvr serve keeps it open"):
        from tvr_lightning.search.engine import Searcher

        with Searcher(index, _device(device), store, trust or ()) as searcher:
            like = searcher.read_example(example, "image" if image else "clip") if example else None
            answer = searcher.search(text, top, rerank, candidates, normalize, folder, min_relevance, like)
    show(answer, as_json=json)
    return 0


def run_serve(
    index: Index = Path("index"),
    host: str = "127.0.0.1",
    port: Annotated[int, Range(at_least=0, at_most=65535)] = 8321,
    token: str | None = None,
    max_upload_mib: Count = 64,
    max_pending: Count = 16,
    videos: list[Folder] | None = None,
    store: str | None = None,
    trust: list[str] | None = None,
    device: str | None = None,
) -> int:
    """Serve a web page and an API that search an index.

    Args:
        index: folder of the index.
        host: address to bind to; an address other than this machine's own requires a token, generated by default.
        port: port to listen on.
        token: token that clients send in a header, or once in the page's address; TVR_SEARCH_TOKEN by default.
        max_upload_mib: maximum size of an example clip in MiB.
        max_pending: maximum number of running and pending searches; further requests get status 429.
        videos: folder whose videos may be served, can be repeated; the folders that you indexed by default.
        store: address of the index's vectors, such as s3://BUCKET/PATH, for an index that another user made.
        trust: module whose classes the index's checkpoints may name, can be repeated; its code is run.
        device: device for the methods; a GPU by default if available.
    """
    with shown("serve: loading"):
        from tvr_lightning.search.engine import Searcher
        from tvr_lightning.search.server import ServerOptions, serve

    options = ServerOptions(host, port, token, max_upload_mib * 2**20, max_pending, videos=tuple(videos or ()))
    with Searcher(index, _device(device), store, trust or ()) as searcher:
        serve(searcher, options)
    return 0


def _device(name: str | None) -> str:
    import torch

    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def show(answer: Answer, as_json: bool) -> None:
    """Print what was found, as text or as JSON."""
    if as_json:
        print(json.dumps(answer.plain(), indent=2, ensure_ascii=False))
        return
    for note in answer.notes:
        print(f"note: {note}")
    for r in answer.results:
        where = ", ".join(f"{clock(m.time)} ({m.similarity:.3f})" for m in r.best)
        extra = "" if r.relevance is None else f"  relevance {r.relevance:.2f}"
        extra += "" if r.sound is None else f"  sound {r.sound:+.3f}"
        extra += "" if r.bias is None else f"  bias {r.bias:+.3f}"
        path = _from_here(Path(r.path))
        print(f"{r.rank:3d}. {r.score:.4f}  (candidate {r.first_rank}, cosine {r.cosine:.3f}){extra}  {path}")
        print(f"     best at {where}")
        for text in list(dict.fromkeys(r.captions))[:CAPTIONS_SHOWN]:
            print(f"     {text}")


def _from_here(path: Path) -> Path:
    """Return a path as a user would type it: from the working folder on where it lies inside."""
    return path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path
