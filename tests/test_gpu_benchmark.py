"""The benchmark for GPUs runs completely, with small sizes on a CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def run(*options):
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)


@pytest.mark.slow
def test_every_part_of_it_runs_on_a_cpu_if_asked_to(tmp_path):
    refused = run()
    assert refused.returncode == 2
    assert "--device cpu --small" in refused.stderr
    done = run("--device", "cpu", "--small", "--out", str(tmp_path / "gpu.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("\n## ") == 7
    assert "Run on a CPU" in text
    for row in (r"\| GARE \| bf16 \| \d", r"\| NCL on CLIP4Clip \| recipe \| \d", r"\| BertAdam \| 24 \| 1"):
        assert re.search(row, text), row
    apart = re.findall(r"\| (DDP|FSDP2|[\w ]+, resumed under [\w ]+) \| (\S+) \| \d+ \|", text)
    assert len(apart) == 5
    assert all(float(difference) < 1e-3 for _, difference in apart), apart
    assert "best dense over ours" in text
