"""The README: its snippets run as printed, and its values are those of the linked pages."""

import re
import shlex
from pathlib import Path

import pytest
from search_parts import write_clip

from tvr_lightning.cli import main
from tvr_lightning.reproduce.published import published_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_its_lines_of_code_fit_on_the_site():
    code = re.findall(r"^```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert [line for block in code for line in block.splitlines() if len(line) > 80] == []


@pytest.mark.slow
def test_its_commands_run_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks("bash")).splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "tvr"
        assert main(arguments) == 0, line
    assert "text-to-video" in capsys.readouterr().out


@pytest.mark.slow
def test_its_search_runs_without_pretrained_weights(tmp_path, monkeypatch, capsys):
    """The commands and the Python block as printed, but with random weights, which need no download."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("frisbee.mp4", "breakfast.mp4")):
        write_clip(tmp_path / name, number)
    (searching,) = (block for block in blocks("") if "tvr index" in block)
    index, search, _ = (shlex.split(line, comments=True)[1:] for line in searching.splitlines())
    assert main([*(str(tmp_path) if word == "~/Videos" else word.replace("openai", "none") for word in index)]) == 0
    assert main(search) == 0
    assert "1. " in capsys.readouterr().out
    (block,) = blocks("python")
    exec(block.replace('"openai"', '"none"').replace("print(", "scores = ("), names := {})
    assert names["scores"].shape == (1, 2)


def test_the_values_of_a_paragraph_are_on_the_linked_pages():
    paragraphs = [each for each in re.split(r"\n\n|\n(?=- )", README) if "](benchmarks/results" in each]
    assert len(paragraphs) >= 3
    for paragraph in paragraphs:
        evidence = "".join((ROOT / page).read_text(encoding="utf-8") for page in re.findall(r"\]\(([^)#]+)", paragraph))
        known = set(NUMBER.findall(evidence)) | {"4", "16", "32", "95"}  # CLIP4Clip, float16, float32, the intervals
        words = re.sub(r"\]\([^)]*\)", "", paragraph)
        assert [number for number in NUMBER.findall(words) if number not in known] == [], paragraph


def test_published_results_are_those_of_the_papers():
    row = r"^\| (GARE|TC-MGC|NCL|DPDV|GAID)\b.*?\| ([\d.]+) \| ([\d.]+) \|$"
    shown = re.findall(row, (ROOT / "docs" / "status.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == 5
    printed = {(row.paper, row.direction, row.printed("R@1")) for row in published_rows() if row.dataset == "MSR-VTT"}
    for paper, text_to_video, video_to_text in shown:
        assert (paper, "t2v", float(text_to_video)) in printed
        assert (paper, "v2t", float(video_to_text)) in printed
