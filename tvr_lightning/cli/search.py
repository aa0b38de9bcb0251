"""`tvr index`, `tvr search`, and `tvr serve`; their signatures and docstrings are the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvr_lightning.cli.loading import chosen_device, loading
from tvr_lightning.cli.types import File, FileOrFolder, Folder, Index, NewFolder, Port
from tvr_lightning.config.recipe_files import refuse_options
from tvr_lightning.option_types import Count, FrameSampling, Share
from tvr_lightning.progress import shown
from tvr_lightning.search.errors import RefusedError, SearchError
from tvr_lightning.search.results import Answer, Normalize, SegmentKind, clock, printable

CAPTIONS_SHOWN = 2


def index(
    videos: list[FileOrFolder] = [],  # noqa: B006
    /,
    out: NewFolder = Path("index"),
    ckpt_path: list[File] = [],  # noqa: B006
    weights: str | None = None,
    architecture: str | None = None,
    frames: Count | None = None,
    sampling: FrameSampling | None = None,
    store: str | None = None,
    bank: File | None = None,
    captions: File | None = None,
    trust: list[str] = [],  # noqa: B006
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
        ckpt_path: checkpoints of one or more methods; the vectors of the first find candidates, and each can rank them;
            can be repeated.
        weights: weights of a CLIP with averaged frames, without a checkpoint: a file, an open_clip tag, or none.
        architecture: open_clip name of that CLIP; ViT-B-32 by default.
        frames: number of frames per video of that CLIP; 12 by default.
        sampling: rule for selecting those frames; one-fps-uniform by default.
        store: lancedb, or qdrant://HOST:PORT.
        bank: text file with one query per line, for --normalize sinkhorn.
        captions: file with descriptions of the videos: parquet from `tvr caption`, or .csv or .jsonl with its columns.
        trust: module whose classes the checkpoints may name, can be repeated; its code is run.
        segments: rule for cutting videos longer than segment_length: shots (by default), windows, or none.
        segment_length: length of a window, and maximum length of a shot, in seconds; 20 by default.
        segment_overlap: overlap of windows in seconds; 0 by default.
        batch_size: number of videos per pass through an encoder.
        num_workers: number of threads that decode.
        device: device for the encoders; a GPU by default if available.
        prune: removal of missing videos even if they are more than 5 % of the index, or moved within their folder.
    """
    encoder: dict[str, Any] = {"architecture": architecture, "frames": frames, "sampling": sampling}
    is_new = not (out / "catalog.sqlite").is_file()
    if ckpt_path:
        reason = "cannot be combined with --ckpt_path, since a checkpoint contains its own weights and options."
        refuse_options({"weights": weights} | encoder, reason)
    elif not weights and not is_new:
        refuse_options(encoder, f"cannot be used, since {out} records the options of its methods. Use a new folder.")
    with loading("index"):
        from tvr_lightning.search.indexing import index as index_videos
        from tvr_lightning.search.scorer import ScorerSource
        from tvr_lightning.search.segments import LENGTH, Segments

    sources = [ScorerSource(checkpoint=str(path)) for path in ckpt_path]
    if not sources and (weights or is_new):
        given = {name: value for name, value in encoder.items() if value is not None}
        sources = [ScorerSource(weights=weights or "openai", **given)]
        if weights == "none":
            warning = "WARNING: The weights are RANDOM, so results are meaningless. Use --ckpt_path or --weights."
            print(warning, file=sys.stderr)
    try:
        queries = None if bank is None else bank.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SearchError(f"{bank}: cannot be read as text: {error}") from error
    cutting = None
    if (segments, segment_length, segment_overlap) != (None, None, None):
        length = LENGTH if segment_length is None else segment_length
        cutting = Segments(segments or "shots", length, segment_overlap or 0.0)
    report = index_videos(
        videos,
        out,
        sources,
        store,
        queries,
        batch_size,
        num_workers,
        chosen_device(device),
        captions=captions,
        trust=trust,
        segments=cutting,
        prune=prune,
    )
    for line in report.lines():
        print(printable(line))
    if report.total:
        print(f'Wrote {out}. Next: tvr search "a query" --index {out}, or tvr serve --index {out}')
        return 0
    print(f"{out} contains no videos, so there is nothing to search.")
    return 1


def search(
    query: list[str] = [],  # noqa: B006
    /,
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
    trust: list[str] = [],  # noqa: B006
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
        candidates: number of segments that this scorer ranks.
        normalize: sinkhorn keeps hub videos from dominating the results; the index needs a --bank.
        folder: folder whose videos may be found, relative to an indexed folder.
        min_relevance: minimum relevance of results, from 0 to 1: the share of unrelated queries that would score lower.
        json: print JSON.
        store: address of the index's vectors, qdrant://HOST:PORT, for an index that another user made.
        trust: module whose classes the index's checkpoints may name, can be repeated; its code is run.
        device: device for the methods; a GPU by default if available.
    """
    if video and image:
        raise RefusedError("Use one example, either --video or --image.")
    with shown("search: opening the index; tvr serve keeps it open"):
        from pydantic import ValidationError

        from tvr_lightning.search.engine import Searcher
        from tvr_lightning.search.query import SearchQuery, sentence

        with Searcher(index, chosen_device(device), store, trust) as searcher:
            example = video or image
            like = searcher.add_example(example, "image" if image else "clip") if example else None
            try:
                asked = SearchQuery(
                    query=" ".join(query),
                    like=like,
                    top=top,
                    rerank=rerank,
                    candidates=candidates,
                    normalize=normalize,
                    folder=folder,
                    min_relevance=min_relevance,
                )
            except ValidationError as error:
                raise RefusedError(sentence(error.errors())) from error
            answer = searcher.search(asked)
    show(answer, as_json=json)
    return 0


def serve(
    index: Index = Path("index"),
    host: str = "127.0.0.1",
    port: Port = 8321,
    token: str | None = None,
    max_upload_mib: Count = 64,
    max_pending: Count = 16,
    videos: list[Folder] = [],  # noqa: B006
    store: str | None = None,
    trust: list[str] = [],  # noqa: B006
    device: str | None = None,
) -> int:
    """Serve a web page and an API that search an index.

    Args:
        index: folder of the index.
        host: address to bind to; an address other than this machine's own requires a token, generated by default.
        port: port to listen on.
        token: token that clients send in a header, or once in the page's address; TVR_SEARCH_TOKEN by default.
        max_upload_mib: maximum size of an example clip in MiB.
        max_pending: maximum number of running and pending searches, and of uploads; further requests get status 429.
        videos: folder whose videos may be served, can be repeated; the folders that you indexed by default.
        store: address of the index's vectors, qdrant://HOST:PORT, for an index that another user made.
        trust: module whose classes the index's checkpoints may name, can be repeated; its code is run.
        device: device for the methods; a GPU by default if available.
    """
    with loading("serve"):
        from tvr_lightning.search.engine import Searcher
        from tvr_lightning.search.server import ServerOptions
        from tvr_lightning.search.server import serve as serve_index

    options = ServerOptions(host, port, token, max_upload_mib * 2**20, max_pending, videos=tuple(videos))
    with Searcher(index, chosen_device(device), store, trust) as searcher:
        serve_index(searcher, options)
    return 0


def show(answer: Answer, as_json: bool) -> None:
    """Print the results with the score that orders them, or everything that is known as JSON."""
    if as_json:
        print(json.dumps(asdict(answer), indent=2))
        return
    lines = [f"note: {note}" for note in answer.notes]
    for r in answer.results:
        path = Path(r.path)
        path = path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path
        lines.append(f"{r.rank:3d}. {r.score:.4f}  {path}")
        lines.append(f"     best at {', '.join(clock(m.time) for m in r.best)}")
        lines += [f"     {text}" for text in list(dict.fromkeys(r.captions))[:CAPTIONS_SHOWN]]
    print("\n".join(map(printable, lines)))
