"""Wrong values of this project's own verbs: a line at once, before anything is loaded, and nothing written."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from tvr_lightning.cli import main
from tvr_lightning.cli.commands import COMMANDS
from tvr_lightning.cli.options import Option, PathKind
from tvr_lightning.option_types import Range

ROOT = Path(__file__).parents[2]
OPTIONS = [
    (command, name, Option(hint))
    for command in COMMANDS
    for name, hint in get_type_hints(command.run, include_extras=True).items()
    if inspect.signature(command.run).parameters.get(name) is not None and name != "overrides"
]
NAMED = [
    (command, name, option)
    for command, name, option in OPTIONS
    if inspect.signature(command.run).parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
]
NUMBERS = [option for option in NAMED if option[2].kind in (int, float)]
PATHS = [option for option in NAMED if isinstance(option[2].limit, PathKind)]


def named(value):
    return getattr(value, "name", None) or getattr(value, "expected", None) or str(value)


def said(words, capsys):
    """What a wrong command says; its one line."""
    assert main(words) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(autouse=True)
def nothing_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("no media")
    (tmp_path / "empty").mkdir()
    yield
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "empty"}


@pytest.mark.parametrize(("command", "name", "option"), NUMBERS, ids=named)
def test_text_instead_of_a_number_is_refused(command, name, option, capsys):
    line = f"tvr: {command.name}: --{name} is many; expected {option.expected}"
    assert said([*command.name.split(), f"--{name}", "many"], capsys).startswith(line)
    assert option.expected not in ("a whole number", "a number") or name == "seed" or name.startswith("segment_")


@pytest.mark.parametrize(("command", "name", "option"), NUMBERS, ids=named)
def test_a_number_out_of_range_is_refused(command, name, option, capsys):
    limit = option.limit or Range()
    below = [] if limit.at_least is None else [limit.at_least - 1]
    above = [] if limit.at_most is None else [limit.at_most + 1]
    for value in below + above:
        line = f"tvr: {command.name}: --{name} is {value}; expected {option.expected}"
        assert said([*command.name.split(), f"--{name}={value}"], capsys).startswith(line)


@pytest.mark.parametrize(("command", "name", "option"), PATHS, ids=named)
def test_a_path_that_is_missing_or_of_another_kind_is_refused(command, name, option, capsys):
    kind, words = option.limit.kind, [*command.name.split(), f"--{name.rstrip('_')}"]
    if kind in ("file", "new file"):
        assert "empty is a folder; name a file" in said([*words, "empty"], capsys)
    if kind in ("folder", "new folder"):
        assert "a.txt is a file; name a folder" in said([*words, "a.txt"], capsys)
    if kind in ("file", "folder"):
        assert f"nowhere: no such {kind}; " in said([*words, "nowhere"], capsys)
    if kind.startswith("new "):
        assert "a.txt/new cannot be created, since " in said([*words, "a.txt/new"], capsys)


AT_ONCE = {
    "data synth msrvtt --root X --videos 6": "data synth: --videos is 6; expected a whole number of at least 8",
    "data synth msrvt": "data synth: dataset is msrvt; expected msrvtt, didemo, lsmdc, activitynet, vatex, msvd, or",
    "data synth": "data synth: the following arguments are required: dataset. `tvr data synth --help`",
    "data import msrvtt": "data import: the following arguments are required: --from. ",
    "data import msrvtt --from a.txt": "data import: --from a.txt is a file; name a folder",
    "data show empty": "data show: video empty is a folder; name a file",
    "data show nowhere.mp4": "data show: video nowhere.mp4: no such file; looked for it at ",
    "data check --config nowhere": "--config nowhere: no such file; ",
    "extract nowhere": "extract: videos nowhere: no such file or folder; looked for it at ",
    "extract --config gaer": "--config gaer: no such file; did you mean recipes/gare.yaml?",
    "evaluate nowhere.npy": "evaluate: scores nowhere.npy: no such file; looked for it at ",
    "index nowhere": "index: videos nowhere: no such file or folder; looked for it at ",
    "index empty --ckpt_path nowhere.ckpt": "index: --ckpt_path nowhere.ckpt: no such file; looked for it at ",
    "search dog": "search: --index index: no such folder; make one with tvr index VIDEOS... --out index",
    "search dog --index a.txt": "search: --index a.txt is a file; name a folder",
    "search dog --min_relevance 2": "search: --min_relevance is 2; expected a number of at least 0 and at most 1",
    "search dog --index a --index b": "search: --index is given more than once. Give it once.",
    "serve --index nowhere": "serve: --index nowhere: no such folder; make one with tvr index VIDEOS... --out nowhere",
    "serve --port 99999": "serve: --port is 99999; expected a whole number of at least 0 and at most 65535",
    "report nowhere": "report: directory nowhere: no such folder; create one with tvr reproduce TABLE --out nowhere",
    "reproduce": "reproduce: the following arguments are required: tables. ",
    "convert nowhere.pth out.ckpt --method xpool": "convert: source nowhere.pth: no such file; looked for it at ",
    "convert a.txt out.ckpt --method xpol": "convert: --method is xpol; expected clip4clip, drl, gaid, gare, tcmgc,",
    "audit --config gare --videos 3": "audit: --videos is 3; expected a whole number of at least 4",
    "fit": "No method is given. Name its recipe, such as --config tcmgc, or a checkpoint to evaluate",
    "test --ckpt_path nowhere.ckpt": "nowhere.ckpt: no such checkpoint; looked for it at ",
    "fit --config nowhere.yaml": "--config nowhere.yaml: no such file; ",
    "fit --index": "fit has no option --index. It is an option of tvr search or tvr serve. `tvr fit --help` lists all",
    "audit --max_pending 3": "audit has no option --max_pending. It is an option of tvr serve. `tvr audit --help`",
    "search --zzz": "search has no option --zzz. `tvr search --help` lists all options.",
    "fit --zzz 3": "fit has no option --zzz. `tvr fit --help` lists all options.",
}


def test_what_a_look_can_tell_is_told_before_torch_is_loaded():
    program = (
        "import json, sys\nfrom tvr_lightning.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n    assert main(words.split()) in (1, 2), words\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules, words\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program, json.dumps(list(AT_ONCE))]
    run = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == len(AT_ONCE)
    for line, start in zip(lines, AT_ONCE.values(), strict=True):
        assert line.startswith(f"tvr: {start}")


def test_another_dataset_in_the_way_and_a_place_that_cannot_be_made_are_a_line(tmp_path, capsys):
    (tmp_path / "empty" / "msvd").mkdir()
    (tmp_path / "empty" / "msvd" / "mine.txt").write_text("mine")
    assert main(["data", "synth", "msvd", "--root", "empty"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    there = "already exists and is not this dataset (500 videos, seed 0). Remove it or choose another root."
    assert line == f"tvr: empty/msvd {there}"
    if Path("/proc/self").is_dir():  # where not even root can make a folder
        assert main(["data", "synth", "msvd", "--root", "/proc/nowhere"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line == "tvr: /proc/nowhere: No such file or directory (-v shows the traceback)"


LATER = {
    "index empty --weights none": "no videos in ",
    "extract empty --weights none": "no videos in empty; supported suffixes: ",
    "report empty": "empty contains no run cards and no results.json. Create runs with",
    "search dog --index empty": "empty contains no index. Create one with tvr index VIDEOS... --out empty",
    "data import msrvtt --from empty --root empty": "",
    "data show a.txt": "a.txt",
    "convert a.txt out.ckpt --method xpool": "a.txt",
    "verify-released empty": "The papers' test videos are required.",
    "evaluate a.txt --ids a.txt": "a.txt",
    "caption --config data/msrvtt --out captions.csv": "out is captions.csv; it must be a .parquet file",
    "index empty --ckpt_path a.txt --weights none": "--weights cannot be combined with --ckpt_path, since a checkpoint",
}


NOT_APPLICABLE = {
    "extract --config clip4clip --frames 8 --seed 0": "--frames, --seed cannot be used with --config.",
    "extract --config clip4clip --architecture ViT-B-32": "--architecture cannot be used with --config.",
    "extract --config clip4clip --weights none --sampling head": "--weights, --sampling cannot be used with",
    "extract --config clip4clip --audio_weights none": "--audio_weights cannot be used with --config.",
    "extract --config clip4clip empty": "Give either a recipe (--config FILE) or video files and folders",
    "extract empty --data.init_args.frames=2": "--data.init_args.frames=2 overrides an option of a recipe.",
    "extract empty --verify_sample 8": "--verify_sample can only be used for a verification. Add --verify.",
    "extract empty --actors 1 --address auto": "--actors, --address can only be used with Ray. Add --engine ray.",
    "extract empty --engine ray --verify": "--engine ray cannot be used with --verify",
    "evaluate a.txt --ids a.txt --data.init_args.split 7k": "--data.init_args.split cannot be used with --ids",
    "evaluate a.txt a.txt --ids a.txt --name mine": "--name cannot be used with two files of scores",
    "evaluate a.txt --ids a.txt --bank_texts a.txt": "--bank_texts can only be used with a normalization",
    "evaluate a.txt --ids a.txt --bank_videos a.txt --normalization DualSoftmax": "--bank_videos can only be used with",
    "profile --config clip4clip --data.init_args.batch_size=8": "--data.init_args.batch_size cannot be used",
    "profile --config clip4clip --trainer.max_epochs 1": "--trainer.max_epochs cannot be used in a profile",
    "reproduce gare-1 --gpus 2": "--gpus can only be used for SLURM jobs. Add --engine slurm.",
}


@pytest.mark.parametrize("words", NOT_APPLICABLE)
def test_an_option_that_does_not_apply_is_refused_and_not_dropped(words, capsys):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tvr: ")
    assert NOT_APPLICABLE[words] in line


@pytest.mark.parametrize("words", LATER)
def test_what_only_the_verb_can_tell_is_a_line_without_a_traceback(words, capsys, monkeypatch):
    monkeypatch.delenv("TVR_DATA", raising=False)
    assert main(words.split()) in (1, 2)
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("tvr: "))
    assert LATER[words] in line
