"""The last step of `make demo`: the search finds the video of its first example."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tvr_lightning.cli import main

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_search_finds_the_video_of_its_first_example(synthetic, tmp_path):
    data, runs = synthetic("msrvtt", 24), tmp_path / "runs"
    small = ["--trainer.max_epochs=2", "--data.init_args.batch_size=8", "--data.init_args.num_workers=0"]
    small += [f"--data.init_args.root={data}", f"--results.directory={runs}"]
    recipes = [f"--config={REPOSITORY / 'recipes' / name}.yaml" for name in ("tcmgc", "fixture")]
    assert main(["fit", *recipes, *small, "--model.init_args.tcmgc.attention.dropout=0"]) == 0

    def demo():
        places = ["--runs", runs, "--videos", data / "msrvtt", "--out", tmp_path / "index"]
        command = [sys.executable, str(REPOSITORY / "benchmarks" / "demo_search.py"), *map(str, places)]
        return subprocess.run(command, capture_output=True, text=True)

    done = demo()
    assert done.returncode == 0, done.stderr
    (path,) = runs.glob("*/version_0/ranks.parquet")
    ranks = pd.read_parquet(path)
    first = ranks[(ranks.direction == "text-to-video") & (ranks["rank"] == 1)]
    assert re.findall(r'^tvr search "(.*)"$', done.stdout, re.MULTILINE) == first["query"][:3].tolist()
    answers = re.findall(r"^  1\. .*/(\w+)\.mp4$", done.stdout, re.MULTILINE)
    assert answers == first["video"][:3].tolist()
    assert f"The video of this caption is {answers[0]}: place 1\n" in done.stdout
    wrong = ranks.assign(rank=1)
    wrong["video"] = wrong["video"].iloc[::-1].to_numpy()
    wrong.to_parquet(path)
    assert demo().returncode == 1, "a wrong example is an error"
