"""Two-stage search: agreement with exhaustive scoring, and the cost of the first stage.

Agreement is measured with GARE with random weights on a synthetic gallery of features, by scoring every query both
exhaustively and with k candidates. The first stage searches random unit vectors in each store.

Command: python benchmarks/search.py --out FILE.md
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

import tvr_lightning
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.evaluation.two_stage import nearest, score_candidates
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.gare.method import GARE
from tvr_lightning.methods.gare.options import GAREOptions
from tvr_lightning.search.table import IndexTable

WIDTH, FRAMES, TOP = 512, 12, 10


class InMemory:
    """A baseline that computes all cosines with torch."""

    def add(self, keys, vectors):
        self.vectors = vectors

    def finish(self):
        pass

    def nearest(self, query, count):
        return (self.vectors @ query).topk(count).indices.tolist()


class Table:
    """Table of an index whose rows contain a vector but no features or thumbnails."""

    def __init__(self, folder):
        self.table = IndexTable(Path(folder, "index"), create=True)
        self.table.set_fact("scorers", [])

    def add(self, keys, vectors):
        rows = zip(keys, vectors.numpy(), strict=True)
        self.table.commit(
            [{"id": f"{n:016x}", "place": 0, "key": n, "path": f"/videos/{n}", "vector": vector} for n, vector in rows]
        )

    def finish(self):
        self.table.optimize(finish=True)

    def nearest(self, query, count):
        return [span.key for span in self.table.nearest(query, count)]


def gallery(videos, queries, noise, seed=0):
    """Return videos around random topics, with frames around their video and queries around some videos."""
    draw = torch.Generator().manual_seed(seed)
    topics = torch.randn(200, WIDTH, generator=draw)
    centers = topics[torch.randint(200, (videos,), generator=draw)] + torch.randn(videos, WIDTH, generator=draw)
    frames = centers[:, None] + noise * torch.randn(videos, FRAMES, WIDTH, generator=draw)
    about = torch.randint(videos, (queries,), generator=draw)
    sentence = centers[about] + noise * torch.randn(queries, WIDTH, generator=draw)
    mask = torch.ones(queries, 1, dtype=torch.bool)
    text = TextFeatures(sentence, sentence[:, None], mask)
    return text, VideoFeatures(frames, torch.ones(videos, FRAMES, dtype=torch.bool))


@torch.no_grad()
def agreement(videos, queries, candidates):
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=WIDTH, image_size=32, text_layers=1, vision_layers=1)
    method = GARE(encoder, frames=FRAMES, gare=GAREOptions(temporal_layers=0)).eval()
    text, video = gallery(videos, queries, noise=1.0)
    exhaustive = method.score(text, video).similarity.topk(TOP).indices
    lines = []
    for k in candidates:
        found = nearest(text.sentence, video.frames.mean(1), k)
        scores = score_candidates(method.score, text, video, found, videos_per_block=64)
        best = found.gather(1, scores.topk(TOP).indices)
        same = (best.sort().values == exhaustive.sort().values).all(1)
        shared = (best[:, :, None] == exhaustive[:, None]).any(1).float().mean()
        lines.append(f"| {k} | {100 * same.float().mean():.1f} % | {100 * shared:.2f} % |")
    return lines


def cpu_seconds():
    """Return the CPU time of all threads of this process, which does not depend on other processes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_queries(store, queries, count):
    """Return the keys found for each query, percentiles of the latency in ms, and CPU ms per query."""
    found, took, cpu = [], [], cpu_seconds()
    for query in queries:
        began = time.perf_counter()
        hits = store.nearest(query, count)
        took.append(1000 * (time.perf_counter() - began))
        found.append(set(hits))
    return found, np.percentile(took, [50, 95, 99]), 1000 * (cpu_seconds() - cpu) / len(queries)


def first_stage(size, dimension, questions, names):
    vectors = torch.randn(size, dimension, generator=torch.Generator().manual_seed(1))
    vectors /= vectors.norm(dim=-1, keepdim=True)  # in place: a million of them take 2 GB
    queries = normalize(torch.randn(questions, dimension, generator=torch.Generator().manual_seed(2)), dim=-1)
    exact = [set((vectors @ query).topk(256).indices.tolist()) for query in queries]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            stores = {"lancedb": Table, "exact": lambda _: InMemory()}
            store = stores[name](folder)
            began, cpu = time.perf_counter(), cpu_seconds()
            for start in range(0, size, size if name == "exact" else 100_000):
                stop = size if name == "exact" else min(start + 100_000, size)
                store.add(range(start, stop), vectors[start:stop])
            store.finish()
            store.nearest(queries[0], 256)
            built = f"{time.perf_counter() - began:.1f} | {cpu_seconds() - cpu:.1f}"
            found, p, each = run_queries(store, queries, 256)
            recall = np.mean([len(a & b) / len(b) for a, b in zip(found, exact, strict=True)])
            late = f"{p[0]:.1f} | {p[1]:.1f} | {p[2]:.1f} | {each:.1f}"
            disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / size
            yield f"| {size:,} | {name} | {built} | {late} | {100 * recall:.1f} % | {disk:,.0f} |"


def two_stage_table(videos, queries):
    return [
        f"GARE with random weights, {videos} synthetic videos, {queries} queries. The table compares the first {TOP} "
        "results from k candidates with those of exhaustive scoring.",
        "",
        f"| k | queries with the same {TOP} results | shared results |",
        "|---|---|---|",
        *agreement(videos, queries, [64, 128, 256]),
        "",
    ]


FIRST_STAGE = [
    "## First stage",
    "",
    f"{WIDTH}-dimensional vectors, 256 candidates. The table shows percentiles of the latency in ms, CPU ms per query "
    "over all threads, and bytes on disk per vector. Random vectors have no neighborhoods, which is the hardest case "
    "for an approximate index. `exact` compares the query with all vectors in torch. It is a baseline of the "
    "benchmark, not a store of the package.",
    "",
    "| vectors | store | build s | build CPU s | p50 | p95 | p99 | CPU ms | recall of the 256 | bytes |",
    "|---|---|---|---|---|---|---|---|---|---|",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--videos", type=int, default=2000, help="number of videos in the two-stage table; 0: no table")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--stores", nargs="+", default=["exact", "lancedb"])
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    lines = [
        "# Two-stage search",
        "",
        f"tvr-lightning {tvr_lightning.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} thread(s); `python benchmarks/search.py {' '.join(sys.argv[1:])}`",
        "",
    ]
    if options.videos:
        lines += two_stage_table(options.videos, options.queries)
    lines += FIRST_STAGE if options.sizes else []
    print("\n".join(lines), flush=True)
    for size in options.sizes:
        for line in first_stage(size, WIDTH, options.questions, options.stores):
            print(line, flush=True)
            lines.append(line)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
