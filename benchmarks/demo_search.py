"""The last step of `make demo`: index the held-out videos and search for some of them.

The test of the newest run in `--runs` ranked all held-out videos for every held-out caption. This script searches for
three captions whose video the test ranked first. The exit status is 1 if the first search does not find its video.

Command: python benchmarks/demo_search.py --runs build/demo/runs --videos build/demo/msrvtt --out build/demo/index
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import pandas as pd

from tvr_lightning.cli import main as tvr

ASKED = 3
SHOWN = 3


def newest(runs: Path) -> Path:
    """Return the folder of the newest run that was trained and tested."""
    tested = [path.parent for path in runs.glob("*/version_*/ranks.parquet")]
    trained = [run for run in tested if (run / "checkpoints" / "last.ckpt").is_file()]
    if not trained:
        raise SystemExit(f"{runs}: contains no run with checkpoints/last.ckpt and ranks.parquet. Run make demo.")
    return max(trained, key=lambda run: (run / "ranks.parquet").stat().st_mtime_ns)


def ask(run: Path, videos: Path, out: Path) -> bool:
    """Index the held-out videos, print search results, and return whether the first search is correct."""
    from tvr_lightning.cli.search import show
    from tvr_lightning.search.engine import Searcher
    from tvr_lightning.search.query import SearchQuery  # these import torch, so a missing run is reported first

    ranks = pd.read_parquet(run / "ranks.parquet")
    texts = ranks[ranks["direction"] == "text-to-video"]
    files = [str(videos / "videos" / f"{video}.mp4") for video in sorted(set(texts["video"]))]
    shutil.rmtree(out, ignore_errors=True)
    captions, checkpoint = videos / "captions.parquet", run / "checkpoints" / "last.ckpt"
    status = tvr(["index", *files, "--out", str(out), "--captions", str(captions), "--ckpt_path", str(checkpoint)])
    if status:
        raise SystemExit(status)
    known = texts[texts["rank"] == 1]
    print(
        f"\nThe test ranked the matching video first, without ties, for {len(known)} of {len(texts)} held-out "
        f"captions. Searching for {min(ASKED, len(known))} of them:"
    )
    found = []
    with Searcher(out) as searcher:
        for query, video in zip(known["query"][:ASKED], known["video"][:ASKED], strict=True):
            answer = searcher.search(SearchQuery(query=query, top=SHOWN))
            found.append(next((r.rank for r in answer.results if Path(r.path).stem == video), None))
            print(f'\ntvr search "{query}"')
            show(answer, as_json=False)
            print(f"The video of this caption is {video}: " + (f"rank {found[-1]}" if found[-1] else "not shown"))
    return found[:1] == [1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of runs")
    parser.add_argument("--videos", type=Path, required=True, help="synthetic dataset in MSR-VTT's layout")
    parser.add_argument("--out", type=Path, required=True, help="folder of the index, which is replaced")
    arguments = parser.parse_args()
    if not ask(newest(arguments.runs), arguments.videos, arguments.out):
        print("The search does not answer as the test did.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
