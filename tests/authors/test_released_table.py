"""A released checkpoint of each family, converted and tested with two commands."""

import json
from contextlib import nullcontext

import pandas as pd
import pytest
import torch
from authors.stand_ins import FAMILIES, D, stand_in

import tvr_lightning
from tvr_lightning.authors.convert import import_checkpoint
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import data_from_recipe
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.encoders import TinyWhisperEncoder
from tvr_lightning.ranks import count_ranks

WORDS = {"clip4clip": 32, "drl": 32, "gare": 32, "tcmgc": 32, "xpool": 77, "tmass": 77, "gaid": 77}
SIZES = {"xclip": (12, 6), "ucofia": (6, 4)}
"""Words and frames that the matrices of the stand-ins fix."""

POOLING = ("xpool", "tmass", "gaid")
LEAKS = ("tmass", "gaid")
FAST = [("drl", "real"), ("tcmgc", "msrvtt")]
SLOW = [(family, "msrvtt") for family in FAMILIES if (family, "msrvtt") not in FAST]
SLOW += [("clip4clip-seqTransf", "real"), ("xpool", "real"), ("gaid", "real")]  # every rule of sampling
SAMPLING = dict.fromkeys(POOLING, "container-segments") | dict.fromkeys(("gare", "drl"), "round-fps-uniform")


@pytest.fixture(scope="module")
def real(test_data, tmp_path_factory):
    """The clips of MSR-VTT's test set that are present."""
    root, source = tmp_path_factory.mktemp("real"), test_data / "annotations" / "msrvtt"
    present = {path.stem: path for path in (source / "videos").iterdir()}
    (root / "msrvtt" / "videos").mkdir(parents=True)
    rows = pd.read_csv(source / "MSRVTT_JSFUSION_test.csv")
    rows = rows[rows["video_id"].isin(present)]
    rows.to_csv(root / "msrvtt" / "MSRVTT_JSFUSION_test.csv", index=False)
    for name in rows["video_id"]:
        (root / "msrvtt" / "videos" / present[name].name).symlink_to(present[name])
    return root


@pytest.fixture
def two_commands(tmp_path, monkeypatch, capsys):
    """Convert a checkpoint and test the result as a user does; return the folder of the results."""

    def run(checkpoint, root, leaks=False):
        torch.save(checkpoint, tmp_path / "released.bin")
        monkeypatch.setenv("TVR_DATA", str(root))
        monkeypatch.chdir(tmp_path)
        assert main(["convert", str(tmp_path / "released.bin"), str(tmp_path / "out.ckpt")]) == 0
        test = ["test", "--ckpt_path", str(tmp_path / "out.ckpt"), "--model.init_args.evaluation.audit=0"]
        with pytest.warns(UserWarning, match="ground truth leaks") if leaks else nullcontext():
            assert main(test) == 0
        (results,) = tmp_path.glob("runs/*/*/results.json")
        assert "RANDOM" not in "".join(capsys.readouterr())
        return results.parent

    return run


def by_importer(method, checkpoint):
    """Return texts and videos of the test set, text i and video i matching, their similarities (N, M), and those that
    the results rank, without the command line."""
    words, frames = SIZES.get(method) or (min(WORDS[method], 77 if method in POOLING else 40), 12)
    sound = {"audio_encoder": TinyWhisperEncoder(D, seed=0)} if method == "gaid" else {}
    module = import_checkpoint(checkpoint, "file", words, frames, method, **sound)
    options = {"words": words, "frames": frames, "image_size": module.encoder.image_size, "num_workers": 0}
    variants = [f"recipes/variants/{method}-as-released.yaml"] if method in LEAKS else []
    data = data_from_recipe(
        [f"recipes/{method}.yaml", *variants], [f"--data.init_args.{name}={value}" for name, value in options.items()]
    )
    data.needs = module.needs
    ((texts,), (videos,)) = (list(loader) for loader in data.evaluation_dataloaders("test"))
    with torch.no_grad():
        text = module.text_features(texts)[texts.index.argsort()]
        video = module.video_features(videos)[videos.index.argsort()]
        similarity = module.score(text, video).similarity
        ranked = module.score_as_released(text, video, text).similarity if method in LEAKS else similarity
    return text, video, similarity, ranked


@pytest.mark.parametrize(("family", "data"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_two_commands_give_the_ranks_of_the_importer(family, data, two_commands, tmp_path, request):
    checkpoint, method = stand_in(family), family.partition("-")[0]
    results = two_commands(checkpoint, request.getfixturevalue(data), method in LEAKS)
    found = json.loads((results / "results.json").read_text())
    assert not found["partial"]
    assert found["skipped"] == []
    assert found["weights"]["overridden"] == []
    assert found["trained_on"] is None
    warnings = [warning for warning in found["warnings"] if warning != SYNTHETIC and "truncated" not in warning]
    assert warnings == (["leaks ground truth"] if method in LEAKS else [])
    text, video, similarity, ranked = by_importer(method, checkpoint)
    table = pd.read_parquet(next(results.glob("*.parquet")))
    for direction, expected in (("text-to-video", ranked), ("video-to-text", ranked.T)):
        there = table[table["direction"] == direction]
        ranks = count_ranks(expected, torch.arange(len(expected))).expected()
        assert sorted(there["rank"]) == sorted(ranks.tolist())
    model = tvr_lightning.load(tmp_path / "out.ckpt")
    with torch.no_grad():
        torch.testing.assert_close(model.module.score(text, video).similarity, similarity, rtol=0, atol=1e-6)
    config = found["config"]["data"]["init_args"]
    assert (config["words"], config["frames"]) == SIZES.get(method, (WORDS.get(method), 12))
    assert config["sampling"] == model.scorer.sampling == SAMPLING.get(method, "int-fps-uniform")
    assert config["audio"] == ("whisper" if method == "gaid" else "none")
    assert found["config"]["model"]["init_args"]["encoder"]["init_args"]["text_mask"] is (method == "gare")
