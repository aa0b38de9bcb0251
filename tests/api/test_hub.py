"""A trained method is pushed to a local substitute of the Hub and loaded; incomplete runs are not pushed."""

import json

import huggingface_hub
import pytest
import torch
import yaml
from hub_stand_in import serving
from safetensors.torch import load_file
from search_parts import write_clip

import tvr_lightning
from tvr_lightning.api.hub import model_card, without_paths
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.errors import UserError
from tvr_lightning.training.checkpoints import FROZEN, CheckpointError
from tvr_lightning.training.module import remove_frozen_weights


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "good")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with serving("user/taken", {"README.md": b"else"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


@pytest.fixture
def checkpoint(finished_run):
    return finished_run / "checkpoints" / "last.ckpt"


def test_a_pushed_method_gives_the_scores_of_its_checkpoint_even_offline(
    hub, finished_run, msrvtt, checkpoint, tmp_path, monkeypatch
):
    address = tvr_lightning.push_to_hub(checkpoint, "user/tiny")
    assert address.endswith("/user/tiny")
    files = hub.repositories["user/tiny"]
    assert set(files) == {"README.md", "model.safetensors", "config.json", "recipe.yaml", "results.json"}
    assert hub.private == set()
    clip = write_clip(tmp_path / "a.mp4", 3)
    back, own = tvr_lightning.load("hf:user/tiny"), tvr_lightning.load(checkpoint)
    texts = ["a red star", "a small dog"]
    assert torch.equal(back.score(texts, clip), own.score(texts, clip))
    (tmp_path / "weights").write_bytes(files["model.safetensors"])
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert load_file(tmp_path / "weights").keys() == saved.keys()
    assert yaml.safe_load(files["recipe.yaml"])["model"]["class_path"].endswith("CLIP4Clip")
    for name in ("README.md", "config.json", "recipe.yaml", "results.json"):
        assert str(msrvtt) not in files[name].decode(), name
        assert str(finished_run.parents[2]) not in files[name].decode(), name
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = tvr_lightning.load("hf:user/tiny")
    assert torch.equal(again.score(texts, clip), own.score(texts, clip)), "downloaded files are kept"


def test_options_that_name_local_files_of_the_data_are_not_published(
    hub, finished_run, checkpoint, tmp_path, monkeypatch
):
    saved, local = torch.load(checkpoint, weights_only=True), {"pixels": "pixels", "extra_captions": "more.json"}
    (tmp_path / "pixels").mkdir()
    monkeypatch.chdir(tmp_path)
    saved["datamodule_hyper_parameters"] |= local
    torch.save(saved, "local.ckpt")
    tvr_lightning.push_to_hub("local.ckpt", "user/local", results=finished_run / "results.json")
    files = hub.repositories["user/local"]
    recipe = yaml.safe_load(files["recipe.yaml"])
    published = [recipe["data"]["init_args"], json.loads(files["config.json"])["datamodule_hyper_parameters"]]
    for options in published:
        assert options["split"] == "9k"
        assert not {*local, "root", "features"} & options.keys()
    Recipe.parse([files["recipe.yaml"].decode()]).build_data()


def test_frozen_weights_that_only_this_machine_has_are_pushed(hub, finished_run, checkpoint, tmp_path):
    saved = torch.load(checkpoint, weights_only=True)
    saved["hyper_parameters"]["tuning"] = {"class_path": "tvr_lightning.encoders.Frozen", "init_args": {}}
    start = tmp_path / "start.ckpt"
    torch.save({"state_dict": {n: t for n, t in saved["state_dict"].items() if n.startswith("encoder.")}}, start)
    saved["hyper_parameters"]["encoder"]["init_args"]["trained_in"] = str(start)
    module = tvr_lightning.load(checkpoint).module.requires_grad_(True)
    module.encoder.requires_grad_(False)
    remove_frozen_weights(saved, module)
    assert FROZEN in saved
    torch.save(saved, tmp_path / "small.ckpt")
    tvr_lightning.push_to_hub(tmp_path / "small.ckpt", "user/small", results=finished_run / "results.json")
    start.unlink()
    clip = write_clip(tmp_path / "a.mp4", 3)
    back, own = tvr_lightning.load("hf:user/small"), tvr_lightning.load(checkpoint)
    assert torch.equal(back.score("a red star", clip), own.score("a red star", clip))


def test_the_model_card_contains_the_results_of_the_run(hub, finished_run, checkpoint):
    tvr_lightning.push_to_hub(checkpoint, "user/card", private=True)
    card = hub.repositories["user/card"]["README.md"].decode()
    assert hub.private == {"user/card"}
    results = json.loads((finished_run / "results.json").read_text())
    text_to_video = results["text_to_video"]
    assert f"| text-to-video | {text_to_video['R@1']:.1f} | {text_to_video['R@5']:.1f} |" in card
    data = yaml.safe_load(card.split("---")[1])
    assert data["library_name"] == "tvr-lightning"
    assert "datasets" not in data, "the videos are synthetic"
    (entry,) = data["model-index"]
    stated = {}
    for result in entry["results"]:
        stated |= {(result["task"]["type"], metric["type"]): metric["value"] for metric in result["metrics"]}
    for direction, key in (("text-to-video", "text_to_video"), ("video-to-text", "video_to_text")):
        for metric in ("R@1", "R@5", "R@10", "MdR", "MnR"):
            assert stated[f"{direction}-retrieval", metric] == round(results[key][metric], 2)
    assert {result["dataset"]["name"] for result in entry["results"]} == {"synthetic MSR-VTT"}
    for part in (
        "trained with tvr-lightning on synthetic MSR-VTT.\n", "synthetic MSR-VTT (1k-A", f"- {SYNTHETIC}",
        "## Intended use", "## Recipe", "4 texts and 4 videos", 'load("hf:user/card")', "Leakage: not audited",
        "weights of the last step (epoch 2, step 6)",
    ):  # fmt: skip
        assert part in card, part
    recipe = {
        "data": {"class_path": "tvr_lightning.data.MSRVTT"},
        "model": {"init_args": {"encoder": {"init_args": {"architecture": "ViT-B-32", "weights": "openai"}}}},
    }
    data = model_card("user/card", results | {"trained_on": "MSR-VTT"}, recipe, None).data
    assert data.base_model == "timm/vit_base_patch32_clip_224.openai"
    assert data.datasets == ["friedrichor/MSR-VTT"]


def test_a_second_push_on_the_command_line_creates_a_revision(hub, checkpoint, capsys):
    assert main(["push", str(checkpoint), "user/again", "--private"]) == 0
    first = dict(hub.repositories["user/again"])
    assert capsys.readouterr().out.endswith("/user/again\n")
    assert main(["push", str(checkpoint), "user/again", "--license", "mit"]) == 0
    second = hub.repositories["user/again"]
    assert yaml.safe_load(second["README.md"].decode().split("---")[1])["license"] == "mit"
    assert {name for name in first if first[name] != second[name]} == {"README.md"}
    hub.full = True
    assert main(["push", str(checkpoint), "user/again"]) == 2
    assert hub.repositories["user/again"] == second, "a method that was there stays there"


def test_paths_of_this_machine_are_reduced_to_names(tmp_path):
    (tmp_path / "my table.csv").touch()
    given = {"table": str(tmp_path / "my table.csv"), "weights": "~/ViT-B-32.pt", "name": "google/mt5-base"}
    given |= {"warnings": [f"scored with {tmp_path}/a.pt (the checkpoint: openai)"], "frames": 12}
    changed = {
        "table": "my table.csv",
        "weights": "ViT-B-32.pt",
        "warnings": ["scored with a.pt (the checkpoint: openai)"],
    }
    assert without_paths(given) == given | changed


def refused(message, action, *arguments, error=UserError):
    with pytest.raises(error, match=message) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)


def test_incomplete_runs_are_refused_in_one_line_and_leave_nothing(
    hub, finished_run, checkpoint, tmp_path, monkeypatch
):
    push, lonely = tvr_lightning.push_to_hub, tmp_path / "checkpoints" / "last.ckpt"
    refused("user/taken already contains something else on", push, checkpoint, "user/taken")
    refused("is not a valid Hub name", push, checkpoint, "user/a/b")
    refused("no such checkpoint", push, tmp_path / "none.ckpt", "user/new", error=CheckpointError)
    lonely.parent.mkdir()
    lonely.write_bytes(checkpoint.read_bytes())
    refused(r"results\.json: No such file.*The model card needs results", push, lonely, "user/new")
    other = json.loads((finished_run / "results.json").read_text())
    other["weights"]["step"] += 1
    for content, message in (({}, "has no results of tvr fit"), (other, "contains results of other weights than")):
        (tmp_path / "results.json").write_text(json.dumps(content))
        refused(message, push, lonely, "user/new")
    saved = torch.load(checkpoint, weights_only=True)
    del saved["datamodule_hyper_parameters"]
    torch.save(saved, lonely)
    refused("contains no recipe", push, lonely, "user/new", error=CheckpointError)
    hub.full = True
    refused("storage limit reached", push, checkpoint, "user/new")
    for name, value, message in (
        ("HF_TOKEN", "bad", "the token was rejected"),
        ("HF_TOKEN", "", "needs a token"),
        ("HF_ENDPOINT", "http://127.0.0.1:9", "the Hub cannot be reached"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            refused(message, push, checkpoint, "user/new")
    assert hub.repositories == {"user/taken": {"README.md": b"else"}}


def test_repositories_without_a_method_are_refused_in_one_line(hub, monkeypatch):
    hub.repositories["user/other"] = {"config.json": b"[]", "model.safetensors": b"{}"}
    for name, message in (
        ("user/none", "no such model"),
        ("user/taken", "no such"),
        ("user/other", "does not contain a method"),
        ("a/b/c", "is not a valid Hub name"),
    ):
        refused(message, tvr_lightning.load, f"hf:{name}")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused("cannot be reached", tvr_lightning.load, "hf:user/elsewhere")
