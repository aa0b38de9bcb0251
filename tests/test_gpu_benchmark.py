"""The script that fills the figures of a GPU runs whole, with small sizes on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_every_part_of_it_runs_on_a_cpu(tmp_path):
    page = tmp_path / "gpu.md"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--out", str(page)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert text.count("\n## ") == 7
    assert "| CLIP4Clip |" in text
    assert "| xpool | 12 |" in text
    assert "best released over ours" in text
    assert "| GARE | 50 | factorised |" in text
    assert "| BertAdam | 24 | 1" in text  # some operators for all tensors


def test_without_a_gpu_it_says_what_runs():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--device cpu --small" in done.stderr
