"""The last step of `make demo`: the search finds the video of its first example."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from forked import tvr

DEMO = Path(__file__).parents[2] / "benchmarks" / "demo_search.py"


@pytest.mark.slow
def test_the_demo_search_finds_the_video_of_its_first_example(finished_run, msrvtt, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "runs" / "clip4clip-msrvtt" / "version_0")

    def demo():
        folders = ["--runs", tmp_path / "runs", "--videos", msrvtt / "msrvtt", "--out", tmp_path / "index"]
        return tvr([*map(str, folders)], tmp_path, program=DEMO)

    done = demo()
    assert done.returncode == 0, done.stderr
    ranks = pd.read_parquet(run / "ranks.parquet")
    first = ranks[(ranks.direction == "text-to-video") & (ranks["rank"] == 1)]
    assert re.findall(r'^tvr search "(.*)"$', done.stdout, re.MULTILINE) == first["query"][:3].tolist()
    answers = re.findall(r"^  1\. .*/(\w+)\.mp4$", done.stdout, re.MULTILINE)
    assert answers == first["video"][:3].tolist()
    assert f"The video of this caption is {answers[0]}: rank 1\n" in done.stdout
    wrong = ranks.assign(rank=1)
    wrong["video"] = wrong["video"].iloc[::-1].to_numpy()
    wrong.to_parquet(run / "ranks.parquet")
    assert demo().returncode == 1, "a wrong example is an error"
