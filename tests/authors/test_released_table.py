"""From a released checkpoint to its table by two commands, for each of the nine families."""

import csv
import json
from contextlib import nullcontext

import pandas as pd
import pytest
import torch
from authors.stand_ins import CASES, FAMILIES, RECORDED, D, of_vit_b_32, stand_in
from parity.case import load_case
from parity.compute.features import encode_case

import tvr_lightning
from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import data_from_recipe
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.encoders import TinyWhisperEncoder
from tvr_lightning.synthetic import synthesize

WORDS = {"clip4clip": 32, "drl": 32, "gare": 32, "tcmgc": 32, "xpool": 77, "tmass": 77, "gaid": 77}
SIZES = {"xclip": (12, 6), "ucofia": (6, 4)}
"""Words and frames that the matrices of the stand-ins fix."""


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    root = tmp_path_factory.mktemp("synthetic")
    synthesize("msrvtt", root, 20, 0, workers=1, progress=False)
    return root


@pytest.fixture(scope="module")
def real(test_data, tmp_path_factory):
    """The clips of MSR-VTT's test set that are present."""
    root, source = tmp_path_factory.mktemp("real"), test_data / "annotations" / "msrvtt"
    present = {path.stem: path for path in (source / "videos").iterdir()}
    (root / "msrvtt" / "videos").mkdir(parents=True)
    with (source / "MSRVTT_JSFUSION_test.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["video_id"] in present]
    for row in rows:
        path = present[row["video_id"]]
        (root / "msrvtt" / "videos" / path.name).symlink_to(path)
    with (root / "msrvtt" / "MSRVTT_JSFUSION_test.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return root


def two_commands(source, folder, monkeypatch, root, leaks=False):
    """Convert a checkpoint and test the result as a user does; return the file and the results' folder."""
    monkeypatch.setenv("TVR_DATA", str(root))
    monkeypatch.chdir(folder)
    assert main(["convert", str(source), str(folder / "out.ckpt")]) == 0
    with pytest.warns(UserWarning, match="ground truth leaks") if leaks else nullcontext():
        assert main(["test", "--ckpt_path", str(folder / "out.ckpt")]) == 0
    (results,) = folder.glob("runs/*/*/results.json")
    return folder / "out.ckpt", results.parent


def by_importer(family, checkpoint):
    """Similarities (N, M) of the test set, text i and video i matching, and options of the data, without the command
    line."""
    method = family.partition("-")[0]
    words, frames = SIZES.get(method) or (min(WORDS[method], 77 if method in ("xpool", "tmass", "gaid") else 40), 12)
    sound = {"audio_encoder": TinyWhisperEncoder(D, seed=0)} if method == "gaid" else {}
    module = import_checkpoint(checkpoint, "file", words, frames, method, **sound)
    options = {"words": words, "frames": frames, "image_size": module.encoder.image_size, "num_workers": 0}
    variants = [f"recipes/variants/{method}-as-released.yaml"] if method in ("tmass", "gaid") else []
    data = data_from_recipe(
        [f"recipes/{method}.yaml", *variants], [f"--data.init_args.{name}={value}" for name, value in options.items()]
    )
    data.tokenise = module.encoder.caption_tokens(words)
    texts, videos = (list(loader) for loader in data.evaluation_dataloaders("test"))
    assert len(texts) == len(videos) == 1
    order = [batch.index.argsort() for batch in (texts[0], videos[0])]
    with torch.no_grad():
        text = module.text_features(texts[0])[order[0]]
        video = module.video_features(videos[0])[order[1]]
        similarity = module.score(text, video).similarity
        if method in ("tmass", "gaid"):
            return similarity, module.score_as_released(text, video, text).similarity, (text, video)
    return similarity, similarity, (text, video)


def ranks(similarity):
    """Expected rank from 1 of every row's own column."""
    own = similarity.diagonal()[:, None]
    return 1 + (similarity > own).sum(1) + ((similarity == own).sum(1) - 1) / 2


def check_table(family, source, checkpoint, folder, monkeypatch, root, capsys):
    leaks = family in ("tmass", "gaid")
    converted, results = two_commands(source, folder, monkeypatch, root, leaks)
    found = json.loads((results / "results.json").read_text())
    assert not found["partial"]
    assert found["skipped"] == []
    assert found["weights"]["overridden"] == []
    assert found["trained_on"] is None
    marks = [mark for mark in found["warnings"] if mark != SYNTHETIC and "truncated" not in mark]
    assert marks == (["leaks ground truth"] if leaks else [])
    similarity, ranked, (text, video) = by_importer(family, checkpoint)
    table = pd.read_parquet(next(results.glob("*.parquet")))
    for direction, expected in (("text-to-video", ranked), ("video-to-text", ranked.T)):
        there = table[table["direction"] == direction]
        assert sorted(there["rank"]) == sorted(ranks(expected).tolist())
    model = tvr_lightning.load(converted)
    with torch.no_grad():
        torch.testing.assert_close(model.module.score(text, video).similarity, similarity, rtol=0, atol=1e-6)
    config = found["config"]["data"]["init_args"]
    assert model.scorer.sampling == config["sampling"]
    said = capsys.readouterr()
    assert "RANDOM" not in said.out + said.err
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_two_commands_give_the_importers_table(family, synthetic, tmp_path, monkeypatch, capsys):
    checkpoint = stand_in(family)
    torch.save(checkpoint, tmp_path / "released.bin")
    found = check_table(family, tmp_path / "released.bin", checkpoint, tmp_path, monkeypatch, synthetic, capsys)
    config = found["config"]["data"]["init_args"]
    method = family.partition("-")[0]
    assert (config["words"], config["frames"]) == SIZES.get(method, (WORDS.get(method), 12))
    rules = dict.fromkeys(("xpool", "tmass", "gaid"), "container-segments") | dict.fromkeys(
        ("gare", "drl"), "round-fps-uniform"
    )
    assert config["sampling"] == rules.get(method, "int-fps-uniform")
    assert config["audio"] == ("whisper" if family == "gaid" else "none")
    assert found["config"]["model"]["init_args"]["encoder"]["init_args"]["text_mask"] is (family == "gare")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_commands_read_the_real_clips(family, real, tmp_path, monkeypatch, capsys):
    checkpoint = stand_in(family)
    torch.save(checkpoint, tmp_path / "released.bin")
    check_table(family, tmp_path / "released.bin", checkpoint, tmp_path, monkeypatch, real, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gare", "xpool"])
def test_the_sizes_of_vit_b_32_are_named_and_the_recipe_changes_nothing(
    family, synthetic, tmp_path, monkeypatch, capsys
):
    torch.save(of_vit_b_32(family), tmp_path / "released.bin")
    capsys.readouterr()
    converted, results = two_commands(tmp_path / "released.bin", tmp_path, monkeypatch, synthetic)
    said = capsys.readouterr()
    assert "RANDOM" not in said.out + said.err
    assert "are now float32" in said.out
    arguments = ["test", "--config", f"recipes/{family}.yaml", "--ckpt_path", str(converted)]
    assert main([*arguments, "--results.directory", str(tmp_path / "again")]) == 0
    (again,) = tmp_path.glob("again/*/*/results.json")
    first, second = (json.loads(path.read_text()) for path in (results / "results.json", again))
    assert second["weights"]["overridden"] == []
    assert second["config"]["model"]["init_args"]["encoder"]["init_args"]["architecture"] == "ViT-B-32"
    assert second["text_to_video"] == first["text_to_video"]


@pytest.mark.parametrize(("family", "name"), RECORDED.items())
@torch.no_grad()
def test_a_converted_checkpoint_gives_the_recorded_similarity(family, name, tmp_path):
    case = load_case(CASES / f"{name}.safetensors")
    torch.save(case.checkpoint, tmp_path / "released.bin")
    words, frames = case.input("input_ids").shape[1], case.input("video").shape[1]
    sizes = ["--words", str(words), "--frames", str(frames)]
    assert main(["convert", str(tmp_path / "released.bin"), str(tmp_path / "out.ckpt"), *sizes]) == 0
    module = tvr_lightning.load(tmp_path / "out.ckpt").module
    text, video = encode_case(case, module.encoder)
    similarity = module.score(text, module.encode_video(video)).similarity
    scaled = similarity if family == "gare" else module.logits(similarity)
    torch.testing.assert_close(scaled, case.expected["similarity"], rtol=1e-4, atol=1e-4)
