"""The last step of `make demo`: the search finds the video of its first example."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tvr_lightning.cli import main

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "demo_search.py"


def run(*words):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True)


@pytest.mark.slow
def test_the_demo_answers_its_own_first_example_right(tmp_path):
    data, runs = tmp_path / "fixture", tmp_path / "runs"
    assert main(["data", "synth", "msrvtt", "--root", str(data), "--videos", "24", "--seed", "0"]) == 0
    small = ["--trainer.max_epochs=2", "--data.init_args.batch_size=8", "--data.init_args.num_workers=0"]
    recipes = [
        word for name in ("tcmgc", "fixture") for word in ("--config", str(REPOSITORY / "recipes" / f"{name}.yaml"))
    ]
    places = [f"--data.init_args.root={data}", f"--results.directory={runs}"]
    assert main(["fit", *recipes, *small, *places, "--model.init_args.tcmgc.attention.dropout=0"]) == 0
    words = ["--runs", runs, "--videos", data / "msrvtt", "--out", tmp_path / "index"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    asked = re.findall(r'^tvr search "(.*)"$', done.stdout, re.MULTILINE)
    (path,) = runs.glob("*/version_0/ranks.parquet")
    ranks = pd.read_parquet(path)
    first = ranks[(ranks.direction == "text-to-video") & (ranks["rank"] == 1)]
    assert asked == first["query"][:3].tolist()
    answers = re.findall(r"^  1\. .*/(\w+)\.mp4$", done.stdout, re.MULTILINE)
    assert answers == first["video"][:3].tolist()
    assert f"The video of this caption is {answers[0]}: place 1\n" in done.stdout
    wrong = ranks.assign(rank=1)
    wrong["video"] = wrong["video"].iloc[::-1].to_numpy()
    wrong.to_parquet(path)
    assert run(*words).returncode == 1, "a wrong example fails"
