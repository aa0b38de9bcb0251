"""The README: its snippets run as printed, and its values are those of the linked pages."""

import re
import shlex
from pathlib import Path

import pytest

from tvr_lightning.cli import main
from tvr_lightning.reproduce.published import published_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_its_snippets_run_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks("bash")).splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "tvr"
        assert main(arguments) == 0, line
    assert "1. " in capsys.readouterr().out  # results of the search
    names: dict = {}
    for block in blocks("python"):
        exec(block, names)
    assert names["scores"].shape == (1, 2)


def test_the_values_of_a_row_are_on_the_linked_pages():
    rows = [line for line in README.splitlines() if line.startswith("|") and "benchmarks/results" in line]
    assert rows
    for row in rows:
        evidence = "".join((ROOT / page).read_text(encoding="utf-8") for page in re.findall(r"\]\(([^)#]+)", row))
        known = set(NUMBER.findall(evidence)) | {"4", "16", "32", "95"}  # CLIP4Clip, float16, float32, the intervals
        cells = re.sub(r"\]\([^)]*\)", "", row)
        assert [number for number in NUMBER.findall(cells) if number not in known] == [], row


def test_published_results_are_those_of_the_papers():
    row = r"^\| (GARE|TC-MGC|NCL|DPDV|GAID)\b.*?\| ([\d.]+) \| ([\d.]+) \| not yet \|$"
    shown = re.findall(row, README, re.MULTILINE)
    assert len(shown) == 5
    printed = {(row.paper, row.direction, row.printed("R@1")) for row in published_rows() if row.dataset == "MSR-VTT"}
    for paper, text_to_video, video_to_text in shown:
        assert (paper, "t2v", float(text_to_video)) in printed
        assert (paper, "v2t", float(video_to_text)) in printed
