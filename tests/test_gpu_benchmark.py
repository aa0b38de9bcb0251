"""The benchmark for GPUs runs completely, with small sizes on a CPU."""

import re
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
    assert "Run on a CPU" in text
    for row in (r"\| GARE \| bf16 \| \d", r"\| NCL on CLIP4Clip \| recipe \| \d", r"\| BertAdam \| 24 \| 1"):
        assert re.search(row, text), row
    apart = re.findall(r"\| (DDP|FSDP2|[\w ]+, resumed under [\w ]+) \| (\S+) \| \d+ \|", text)
    assert len(apart) == 5
    assert all(float(difference) < 1e-3 for _, difference in apart), apart
    assert "best dense over ours" in text


def test_without_a_gpu_it_says_what_runs():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--device cpu --small" in done.stderr
