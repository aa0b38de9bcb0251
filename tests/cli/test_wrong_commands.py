"""Wrong commands and options are refused with one line and write nothing, and most are refused before torch loads."""

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
from tvr_lightning.cli.options import PathKind
from tvr_lightning.option_types import Range, parts_of

ROOT = Path(__file__).parents[2]
NUMBERS, PATHS = [], []
for command in COMMANDS:
    hints = get_type_hints(command.run, include_extras=True)
    for name, parameter in inspect.signature(command.run).parameters.items():
        if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY and name in hints and name != "overrides":
            parts, option = list(parts_of(hints[name])), (command, f"--{name.rstrip('_')}")
            limit = next((part for part in parts if isinstance(part, (Range, PathKind))), Range())
            if isinstance(limit, PathKind):
                PATHS.append(pytest.param(*option, limit.kind, id=f"{command.name} {name}"))
            elif int in parts or float in parts:
                expected = f"{'a whole number' if int in parts else 'a number'}{f' of {limit}' if limit.bounds else ''}"
                NUMBERS.append(pytest.param(*option, limit, expected, id=f"{command.name} {name}"))


def error_of(words, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(autouse=True)
def nothing_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("no media")
    (tmp_path / "empty").mkdir()
    yield
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "empty"}


@pytest.mark.parametrize(("command", "name", "limit", "expected"), NUMBERS)
def test_text_or_a_number_out_of_range_is_refused(command, name, limit, expected, capsys):
    below = [] if limit.at_least is None else [limit.at_least - 1]
    above = [] if limit.at_most is None else [limit.at_most + 1]
    for value in ["many", *below, *above]:
        line = f"tvr: {command.name}: {name} is {value}; expected {expected}"
        assert error_of([*command.name.split(), name, str(value)], capsys).startswith(line)
    assert limit.bounds or name == "--seed" or name.startswith("--segment_")


@pytest.mark.parametrize(("command", "name", "kind"), PATHS)
def test_a_path_that_is_missing_or_of_another_kind_is_refused(command, name, kind, capsys):
    words = [*command.name.split(), name]
    if kind in ("file", "new file"):
        assert "empty is a folder; name a file" in error_of([*words, "empty"], capsys)
    if kind in ("folder", "new folder"):
        assert "a.txt is a file; name a folder" in error_of([*words, "a.txt"], capsys)
    if kind in ("file", "folder"):
        assert f"nowhere: no such {kind}; " in error_of([*words, "nowhere"], capsys)
    if kind.startswith("new "):
        assert "a.txt/new cannot be created, since " in error_of([*words, "a.txt/new"], capsys)


GAHTER = "--model.init_args.gahter=local"
WITHOUT_TORCH = {
    f"fit --config tcmgc --config fixture {GAHTER}": "model.init_args.gahter: TCMGC has no option gahter. ",
    f"profile --config gare {GAHTER}": "model.init_args.gahter: ",
    "fit --config tcmgc --data.init_args.batch_size=0": "data.init_args.batch_size is 0; expected a whole number (at ",
    "data synth msrvt": "data synth: dataset is msrvt; expected msrvtt, didemo, lsmdc, activitynet, vatex, msvd, or",
    "data synth": "data synth: the following arguments are required: dataset. `tvr data synth --help`",
    "data show empty": "data show: video empty is a folder; name a file",
    "extract --config gaer": "--config gaer: no such file; did you mean gare?",
    "evaluate nowhere.npy": "evaluate: scores nowhere.npy: no such file; looked for it at ",
    "index nowhere": "index: videos nowhere: no such file or folder; looked for it at ",
    "search dog": "search: --index index: no such folder; make one with tvr index VIDEOS... --out index",
    "search dog --index a --index b": "search: --index is given more than once. Give it once.",
    "report nowhere": "report: directory nowhere: no such folder; create one with tvr reproduce TABLE --out nowhere",
    "fit": "No method is given. Name its recipe, such as --config tcmgc, or a checkpoint to evaluate",
    "fit --config tcmgc --ckpt_path best": "fit: --ckpt_path best: no such file or folder; looked for it at ",
    "audit --max_pending 3": "audit has no option --max_pending. It is an option of tvr serve. `tvr audit --help`",
    "fit --confg gare": "fit has no option --confg. Did you mean --config?",
    "extract --config clip4clip --parts smell": "extract: --parts is smell; expected text, frames, patches, audio, ",
    "train": "train is not a command. `tvr --help` lists all commands.",
    "evaluat": "evaluat is not a command. Did you mean evaluate? `tvr --help` lists all commands.",
    "datta check": "datta check is not a command. Did you mean data check?",
    "data chek": "data chek is not a command. Did you mean data check?",
    "caption --config fixture": "No dataset is given. Name one before the overlays, such as --config data/msrvtt",
}


def test_help_and_simple_errors_do_not_import_torch(tmp_path_factory, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    error_of(["fit", "--config=gare", GAHTER], capsys)  # saves the schema of options
    program = (
        "import json, sys\nfrom tvr_lightning.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n    try:\n        status = main(words)\n"
        "    except SystemExit as end:\n        status = end.code\n"
        "    assert bool(status) == (words[-1] not in ('--help', '--version')), words\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules, words\n"
    )
    helps = [["--help"], ["--version"], ["fit", "--help"], *([*each.name.split(), "--help"] for each in COMMANDS)]
    words = [sys.executable, "-c", program, json.dumps(helps + [line.split() for line in WITHOUT_TORCH])]
    run = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    for line, start in zip(run.stderr.splitlines(), WITHOUT_TORCH.values(), strict=True):
        assert line.startswith(f"tvr: {start}")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder in which not even root can create one")
def test_a_folder_that_cannot_be_created_is_reported_in_one_line(capsys):
    line = "tvr: /proc/nowhere: No such file or directory (-v shows the traceback)"
    assert error_of(["data", "synth", "msvd", "--root", "/proc/nowhere"], capsys) == line


def test_a_full_disk_is_reported_in_one_line(msrvtt, tmp_path, limit_files, capsys):
    video = msrvtt / "msrvtt" / "videos" / "video0.mp4"
    limit_files(0)
    line = error_of(["data", "show", str(video), "--out", str(tmp_path / "page.svg")], capsys)
    assert line == "tvr: File too large (-v shows the traceback)"


LATER = {
    "index empty --weights none --architecture ViT-S-32-alt": "no videos in ",
    "search dog --index empty": "empty contains no index. Create one with tvr index VIDEOS... --out empty",
    "data import msrvtt --from empty --root empty": "",
    "data show a.txt": "a.txt",
    "convert a.txt out.ckpt --method xpool": "a.txt",
    "evaluate a.txt --ids a.txt": "a.txt",
    "caption --config data/msrvtt --out captions.csv": "out is captions.csv; it must be a .parquet file",
}
NOT_APPLICABLE = {
    "extract --config clip4clip --actors 1 --address auto": "--actors, --address can only be used with Ray.",
    "evaluate a.txt --ids a.txt --data.init_args.split 7k": "No dataset is given",
    "evaluate a.txt a.txt --ids a.txt --name mine": "--name cannot be used with several files of scores",
    "evaluate a.txt --ids a.txt --bank_texts a.txt": "--bank_texts can only be used with a normalization",
    "profile --config clip4clip --data.init_args.batch_size=8": "--data.init_args.batch_size cannot be used",
    "profile --config clip4clip --trainer.max_epochs 1": "--trainer.max_epochs cannot be used in a profile",
    "reproduce gare-1 --gpus 2 --minutes 9": "--minutes, --gpus can only be used for SLURM jobs. Add --engine slurm.",
    "reproduce gare-1 --seeds 0,x": "--seeds '0,x' must be whole numbers separated by commas",
    "reproduce gare-1 --overlay absent.yaml": "--overlay absent.yaml: no such file",
    "reproduce gare-1 --only gadi": "--only 'gadi' is not a run of these tables",
    "reproduce gare-0": "There is no table 'gare-0'. The most similar names are ",
}


@pytest.mark.parametrize("words", LATER | NOT_APPLICABLE)
def test_errors_of_a_command_itself_are_one_line_without_a_traceback(words, capsys, monkeypatch):
    monkeypatch.delenv("TVR_DATA", raising=False)
    status, errors = main(words.split()), capsys.readouterr().err.splitlines()
    line = next(line for line in errors if line.startswith("tvr: "))
    assert (LATER | NOT_APPLICABLE)[words] in line
    if words in NOT_APPLICABLE:
        assert (status, errors) == (2, [line])
    assert status == 2
