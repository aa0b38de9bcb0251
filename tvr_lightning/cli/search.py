"""`tvr index`, `tvr search`, and `tvr serve`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from tvr_lightning.cli.options import Device, File, FileOrFolder, Folder, Index, NewIndex, Port, Trust, chosen_device
from tvr_lightning.config.recipe_files import refuse_options
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count, ExtractEngine, FrameSampling, Share
from tvr_lightning.runs.log import loading
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.results import Answer, Normalize, SegmentKind, clock, printable

CAPTIONS_SHOWN = 2
RERANK = "scorer of the index, CrossEncoder, or module.function that ranks the candidates; none keeps their order"


def index(
    videos: Annotated[list[FileOrFolder], "video files and folders; those already in the index by default"] = [],
    /,
    out: NewIndex = Path("index"),
    ckpt_path: Annotated[list[File], "checkpoint of a method; the vectors of the first find candidates"] = [],
    weights: Annotated[str | None, "weights of a CLIP, without a checkpoint: a file, an open_clip tag, or none"] = None,
    architecture: Annotated[str | None, "open_clip name of that CLIP; ViT-B-32 by default"] = None,
    frames: Annotated[Count | None, "number of frames per video of that CLIP; 12 by default"] = None,
    sampling: Annotated[FrameSampling | None, "rule for selecting those frames; one-fps-uniform by default"] = None,
    bank: Annotated[File | None, "text file with one query per line, for --normalize sinkhorn"] = None,
    captions: Annotated[File | None, "descriptions of the videos: parquet, .csv, or .jsonl as of `tvr caption`"] = None,
    trust: Trust = [],
    segments: Annotated[SegmentKind | None, "rule for cutting long videos: shots (default), windows, or none"] = None,
    segment_length: Annotated[float | None, "maximum length of a segment in seconds; 20 by default"] = None,
    segment_overlap: Annotated[float | None, "overlap of windows in seconds; 0 by default"] = None,
    batch_size: Annotated[Count, "number of videos per pass through an encoder"] = 16,
    num_workers: Annotated[Count, "number of threads that decode"] = 2,
    device: Device = None,
    engine: Annotated[ExtractEngine, "ray uses actors of a Ray cluster to read and encode"] = "local",
    actors: Annotated[Count | None, "number of Ray actors; 1 by default"] = None,
    address: Annotated[str | None, "address of a Ray cluster with the same paths; a local one by default"] = None,
    prune: Annotated[bool, "remove missing videos even if they are over 5 % of the index, or were moved"] = False,
) -> int:
    """Make videos searchable, or update an index: only new, changed, and deleted files are processed.

    Each checkpoint can rank the candidates of a search. Without one, videos are ranked by a CLIP with averaged frames.
    """
    if engine == "local":
        refuse_options({"actors": actors, "address": address}, "can only be used with Ray. Add --engine ray.")
    encoder: dict[str, Any] = {"architecture": architecture, "frames": frames, "sampling": sampling}
    if "://" in str(out):
        from tvr_lightning.search.table import IndexTable

        is_new = IndexTable(out, create=True).is_new
    else:
        is_new = not Path(out, "videos.lance").is_dir()
    if is_new and not videos:
        raise UserError("No videos are given. Name files or folders: tvr index VIDEOS...")
    if ckpt_path:
        reason = "cannot be combined with --ckpt_path, since a checkpoint contains its own weights and options."
        refuse_options({"weights": weights} | encoder, reason)
    elif not weights and not is_new:
        refuse_options(encoder, f"cannot be used, since {out} records the options of its methods. Use a new folder.")
    with loading("index"):
        from tvr_lightning.search.indexing import index as index_videos
        from tvr_lightning.search.scorer import ScorerSource
        from tvr_lightning.search.segments import Segments

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
    asked = {"kind": segments, "length": segment_length, "overlap": segment_overlap}
    cutting: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    report = index_videos(
        videos,
        out,
        sources,
        queries,
        batch_size,
        num_workers,
        chosen_device(device),
        captions=captions,
        trust=trust,
        segments=Segments(**cutting) if cutting else None,
        prune=prune,
        actors=actors or 1 if engine == "ray" else None,
        address=address,
    )
    for line in report.lines():
        print(printable(line))
    if report.total:
        print(f'Wrote {out}. Next: tvr search "a query" --index {out}, or tvr serve --index {out}')
        return 0
    print(f"{out} contains no videos, so there is nothing to search.")
    return 1


def search(
    query: Annotated[list[str], "description of the videos to find"] = [],
    /,
    index: Index = Path("index"),
    video: Annotated[File | None, "example clip instead of or in addition to text"] = None,
    image: Annotated[File | None, "example image instead of or in addition to text"] = None,
    top: Annotated[Count, "number of results"] = 10,
    rerank: Annotated[str | None, RERANK] = None,
    candidates: Annotated[Count, "number of segments that this scorer ranks"] = 256,
    normalize: Annotated[Normalize, "sinkhorn balances the results; the index needs a --bank"] = "none",
    folder: Annotated[str | None, "folder whose videos may be found, relative to an indexed folder"] = None,
    min_relevance: Annotated[Share | None, "minimum share of unrelated queries that would score lower"] = None,
    json: Annotated[bool, "print JSON"] = False,
    trust: Trust = [],
    device: Device = None,
) -> None:
    """Find videos in an index by text or by an example."""
    if video and image:
        raise UserError("Use one example, either --video or --image.")
    if not "".join(query).strip() and not video and not image:
        raise UserError("No query is given. Describe the videos to find, or use --video or --image.")
    from tvr_lightning.progress import shown

    with shown("search: opening the index; tvr serve keeps it open"):
        from pydantic import ValidationError

        from tvr_lightning.search.engine import Searcher
        from tvr_lightning.search.query import SearchQuery, sentence

        with Searcher(index, chosen_device(device), trust, rerank) as searcher:
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
                raise SearchError(sentence(error.errors())) from error
            answer = searcher.search(asked)
    show(answer, as_json=json)


def serve(
    index: Index = Path("index"),
    host: Annotated[str, "address to bind to; any but this machine's own requires a token"] = "127.0.0.1",
    port: Annotated[Port, "port to listen on"] = 8321,
    token: Annotated[str | None, "token of clients; TVR_SEARCH_TOKEN, or a generated one, by default"] = None,
    max_upload_mib: Annotated[Count, "maximum size of an example clip in MiB"] = 64,
    max_pending: Annotated[Count, "maximum number of pending searches, and of uploads; more get status 429"] = 16,
    videos: Annotated[list[Folder], "folder whose videos may be served; the indexed ones by default"] = [],
    rerank: Annotated[str | None, RERANK] = None,
    trust: Trust = [],
    device: Device = None,
) -> None:
    """Serve a web page and an API that search an index.

    Clients send the token in a header, or once in the page's address.
    """
    with loading("serve"):
        from tvr_lightning.search.engine import Searcher
        from tvr_lightning.search.server import ServerOptions
        from tvr_lightning.search.server import serve as serve_index

    options = ServerOptions(host, port, token, max_upload_mib * 2**20, max_pending, videos=tuple(videos))
    with Searcher(index, chosen_device(device), trust, rerank) as searcher:
        serve_index(searcher, options)


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
