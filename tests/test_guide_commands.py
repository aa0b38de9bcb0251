"""The README and three guides run as printed, with small random weights and without a network."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from search_parts import client_of, write_clip

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher

ROOT = Path(__file__).parent.parent


def block_with(page, command, language=""):
    """The fenced block of a page that contains a command."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (block,) = (block for of, block in blocks if of == language and command in block)
    return block


def run_commands(block, **replaced):
    """Run the `tvr` commands of a block, except the one that serves until it is interrupted."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        name, *arguments = words[words.index("tvr") + 1 :]
        if name != "serve":
            assert main([name, *arguments, *replaced.get(name, ())]) == 0, line


@pytest.mark.slow
def test_the_commands_of_the_readme_train_and_test(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_commands(block_with("README.md", "tvr fit", "bash"))
    assert "text-to-video" in capsys.readouterr().out


@pytest.mark.slow
def test_the_search_of_the_readme_runs_without_pretrained_weights(tmp_path, monkeypatch, capsys):
    """The commands and the Python block as printed, but with random weights, which need no download."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("frisbee.mp4", "breakfast.mp4")):
        write_clip(tmp_path / name, number)
    searching = block_with("README.md", "tvr index").replace("~/Videos", str(tmp_path))
    run_commands(searching.replace("openai", "none"))
    assert "1. " in capsys.readouterr().out
    block = block_with("README.md", "encode_video", "python")
    exec(block.replace('"openai"', '"none"').replace("print(", "scores = ("), names := {})
    assert names["scores"].shape == (1, 2)


@pytest.mark.slow
def test_videos_of_a_folder_become_a_search_page_with_lora_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(30):
        write_clip(tmp_path / "clips" / "videos" / f"{number}.mp4", number)
    rows = [f"{number}.mp4,clip number {number},{'train' if number < 22 else 'test'}\n" for number in range(30)]
    (tmp_path / "clips" / "captions.csv").write_text("video,caption,split\n" + "".join(rows))
    small = ["--config=fixture", "--data.init_args.root=clips", "--data.init_args.batch_size=16"]
    run_commands(block_with("docs/own-videos.md", "tvr index"), fit=[*small, "--trainer.max_epochs=2"])
    output = capsys.readouterr().out
    assert "LoRA" in (tmp_path / "runs/clip4clip-videofolder/version_0/config.yaml").read_text()
    assert "text-to-video" in output
    assert "1. " in output
    with Searcher(tmp_path / "my-index") as searcher:
        client = client_of(searcher)
        assert "<title>" in client.get("/").text
        assert len(client.get("/api/search?query=clip+number+3").json()["results"]) == 10


def test_two_systems_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(block_with("docs/recipes.md", "np.save", "python"), {})
    run_commands(block_with("docs/recipes.md", "ours.npy baseline.npy"))
    differences = (tmp_path / "compare" / "report" / "report-differences.csv").read_text()
    assert re.search("^ours,baseline,t2v,R@1,", differences, re.MULTILINE)
    assert (tmp_path / "compare" / "report" / "index.html").is_file()


@pytest.mark.slow
def test_a_further_method_trains_and_passes_the_audit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "tests" / "examples", tmp_path / "tests" / "examples")
    monkeypatch.syspath_prepend(tmp_path / "tests")
    run_commands(block_with("docs/adding-a-method.md", "tvr audit"))
    output = capsys.readouterr().out
    assert "QueryScoring on synthetic MSR-VTT" in output
    assert "none found by the audit" in output
