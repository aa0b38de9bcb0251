"""Files that an untrusted user may have written run no code in any command or function that opens them.

Names stay in their folder, and bad releases are not installed.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_stand_in import serving
from safetensors.torch import save
from search_parts import write_clip
from small_run import small_run

import tvr_lightning
from tvr_lightning.cli import main
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.data.video_files import VideoFiles, path_below
from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.report.figures.encoded_split import encode_run
from tvr_lightning.reproduce.report.sources import read_runs
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource
from tvr_lightning.training.checkpoints import FROZEN

MODULES = ("evilmod", "modeling_evil")
CODE = "from pathlib import Path\nPath({!r}).touch()\nfrom torch.nn import Module\nclass Evil(Module): pass\n"


def with_text(options, folder):
    """Options that name a class as plain text, which jsonargparse would import."""
    options["tuning"] = "evilmod.Evil"


def with_remote_code(options, folder):
    """Options that name a model whose repository contains code."""
    files = {"modules.json": [{"idx": 0, "name": "0", "path": "", "type": "modeling_evil.Evil"}], "config.json": {}}
    for name, content in (files | {"preprocessor_config.json": {"image": 1}}).items():
        (folder / name).write_text(json.dumps(content))
    encoder = {"weights": str(folder), "image_size": 32, "trust_remote_code": True}
    options["encoder"] = {"class_path": "tvr_lightning.encoders.SentenceTransformersEncoder", "init_args": encoder}


@pytest.fixture(params=[with_text, with_remote_code])
def evil(request, finished_run, tmp_path, monkeypatch):
    """A copy of a run whose checkpoint and results.json name code that leaves a file if it is run."""
    (tmp_path / "code").mkdir()
    for name in MODULES:
        (tmp_path / "code" / f"{name}.py").write_text(CODE.format(str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(tmp_path / "code")
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    run = tmp_path / "runs" / "clip4clip-msrvtt" / "version_0"
    shutil.copytree(finished_run, run)
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    request.param(saved["hyper_parameters"], tmp_path / "code")
    torch.save(saved | {FROZEN: "a digest"}, run / "checkpoints" / "last.ckpt")
    results = json.loads((run / "results.json").read_text())
    request.param(results["config"]["model"]["init_args"], tmp_path / "code")
    results["checkpoint"] = str(run / "checkpoints" / "last.ckpt")
    (run / "results.json").write_text(json.dumps(results))
    yield run
    assert not (tmp_path / "ran").exists()
    assert not {*MODULES} & sys.modules.keys()


@pytest.fixture
def refused(capsys):
    """Check that a command, or a function with its arguments, refuses a file in one line."""

    def check(*action):
        capsys.readouterr()
        if isinstance(action[0], str):
            assert main(action) == 2
            error = capsys.readouterr().err.strip().splitlines()[-1]
        else:
            with pytest.raises(UserError) as caught:
                action[0](*action[1:])
            error = str(caught.value)
        assert "\n" not in error
        assert "would run the code of /" in error or "is the text 'evilmod.Evil'" in error

    return check


def test_checkpoints(evil, refused, tmp_path):
    path = str(evil / "checkpoints" / "last.ckpt")
    for command in ("validate", "test", "predict"):
        refused(command, f"--ckpt_path={path}")
    refused("push", path, "user/evil")
    refused("index", str(tmp_path), "--out", str(tmp_path / "index"), "--ckpt_path", path)
    refused(tvr_lightning.load, path)
    refused(tvr_lightning.merge, path, tmp_path / "merged.pt")
    refused(tvr_lightning.push_to_hub, path, "user/evil")


def test_indexes(evil, refused, finished_run, tmp_path):
    clip, path = write_clip(tmp_path / "a.mp4", 3), tmp_path / "method.ckpt"
    shutil.copy(finished_run / "checkpoints" / "last.ckpt", path)
    index([clip], tmp_path / "index", [ScorerSource(str(path))], progress=False)
    shutil.copy(evil / "checkpoints" / "last.ckpt", path)
    for words in (["search", "a star", "--index"], ["serve", "--index"], ["index", "--out"]):
        refused(*words, str(tmp_path / "index"))


def test_repositories_on_the_hub(evil, refused, tmp_path, monkeypatch):
    saved = torch.load(evil / "checkpoints" / "last.ckpt", weights_only=True)
    weights, config = save(saved.pop("state_dict")), {name: saved[name] for name in ("hyper_parameters", FROZEN)}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    files = {"model.safetensors": weights, "config.json": json.dumps(config).encode()}
    with serving("user/evil", files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        refused(tvr_lightning.load, "hf:user/evil")


def test_folders_of_runs(evil, refused, tmp_path, capsys):
    (run,) = read_runs(tmp_path / "runs")
    refused(encode_run, run)
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert "No figures of clip4clip-msrvtt/version_0: " in capsys.readouterr().out


def test_commands_that_read_only_weights(evil, msrvtt, tmp_path):
    """The recipe decides what is built; whether the weights fit it does not matter here."""
    path = str(evil / "checkpoints" / "last.ckpt")
    options = small_run(msrvtt, tmp_path / "runs", "--trainer.limit_test_batches=0")
    main(["fit", *options, f"--ckpt_path={path}"])
    main(["fit", *options, "--checkpoints.resume=true"])
    main(["audit", *options, f"--ckpt_path={path}"])
    main(["convert", path, str(tmp_path / "converted.ckpt")])


@pytest.mark.parametrize("name", ["../secret", "/etc/secret", "movie/../../secret"])
def test_names_that_leave_the_folder_are_refused(name, tmp_path):
    (tmp_path / "secret.mp4").touch()
    (tmp_path / "videos").mkdir()
    with pytest.raises(AnnotationError, match="leads out of the folder"):
        VideoFiles(tmp_path / "videos", ".mp4").find(name)
    with pytest.raises(AnnotationError):
        path_below(tmp_path / "videos", name)


def test_names_with_dots_are_found_or_expected_in_the_folder(tmp_path):
    (tmp_path / "a..b.mp4").touch()
    videos = VideoFiles(tmp_path, ".mp4")
    assert videos.find("a..b") == tmp_path / "a..b.mp4"
    assert videos.find("..c") == tmp_path / "..c.mp4"


def test_an_annotation_file_cannot_name_a_video_elsewhere(msrvtt, tmp_path):
    shutil.copytree(msrvtt, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.mp4"))
    for file in (tmp_path / "msrvtt" / "MSRVTT_train.9k.csv", tmp_path / "msrvtt" / "MSRVTT_data.json"):
        file.write_text(re.sub(r"\bvideo0\b", "../../elsewhere", file.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(AnnotationError, match="elsewhere"):
        MSRVTT(root=str(tmp_path), frames=2, batch_size=2, num_workers=0).read_split("train")


def test_the_compromised_releases_of_lightning_are_excluded():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    (pinned,) = re.findall(r'"(lightning[^"]*)"', project)
    assert {"!=2.6.2", "!=2.6.3"} <= set(pinned.split(","))
