"""The data module that all datasets share: splits, samples, orders, workers, processes, and options."""

import inspect
import json
import multiprocessing
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import tvr_lightning.data as datasets
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import data_from_recipe
from tvr_lightning.config.recipe_files import RECIPES, read_recipe
from tvr_lightning.data import MSRVTT, MSVD, TextVideoDataModule
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.records import SYNTHETIC, AnnotationError
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.media.container import VideoError
from tvr_lightning.testing.processes import quiet_trainer

SMALL = {"frames": 3, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}


def data_of(root: Path, **options) -> MSRVTT:
    return MSRVTT(root=str(root), **{**SMALL, **options})


@pytest.fixture
def broken(own_data):
    """A dataset with one unreadable and one missing video in both splits."""
    data = MSRVTT(root=str(own_data))
    for name in ("train", "test"):
        videos = data.read_split(name).videos
        videos[0].path.write_text("not a video")
        videos[1].path.unlink()
    return own_data


def pixels_by_video(loader, epoch: int = 0) -> dict[tuple[int, int], torch.Tensor]:
    loader.sampler.set_epoch(epoch)
    return {
        (int(batch.text.index[i]), int(batch.video.index[i])): batch.video.video.pixels[i]
        for batch in loader
        for i in range(len(batch.text))
    }


def test_training_batches_contain_matching_pairs(msrvtt):
    data = data_of(msrvtt)
    batch, split = next(iter(data.train_dataloader())), data.load_split("train")
    video = batch.video.video
    assert (video.pixels.shape, video.pixels.dtype) == ((4, 3, 3, 32, 32), torch.uint8)
    assert video.frame_mask.shape == (4, 3)
    assert video.pixels.float().std() > 10
    for i in range(4):
        text, index = split.texts[batch.text.index[i]], int(batch.video.index[i])
        assert (text.video, text.text) == (index, batch.text.text[i])
        assert split.videos[index].video_id == batch.video.video_id[i]


def test_evaluation_covers_every_text_and_video_once(msrvtt):
    data = data_of(msrvtt)
    data.setup("test")
    truth, split = data.ground_truth("test"), data.read_split("test")
    texts, videos = (list(loader) for loader in data.test_dataloader())
    assert all(isinstance(batch, TextBatch) for batch in texts)
    assert all(isinstance(batch, VideoBatch) for batch in videos)
    found = {int(i): text for batch in texts for i, text in zip(batch.index, batch.text, strict=True)}
    assert found == {i: record.text for i, record in enumerate(split.texts)}
    found = {int(i): name for batch in videos for i, name in zip(batch.index, batch.video_id, strict=True)}
    assert found == {i: record.video_id for i, record in enumerate(split.videos)}
    assert [sum(map(len, batches)) for batches in (texts, videos)] == [4, 4]
    assert (truth.texts, truth.videos, truth.split) == (4, 4, "test")
    assert (truth.dataset, truth.warnings) == ("synthetic MSR-VTT", [SYNTHETIC])
    for loader in (data.train_dataloader(), *data.test_dataloader()):
        assert isinstance(loader.sampler, DistributedSampler), "Lightning would replace it in several processes"
    data.trainer = quiet_trainer(limit_test_batches=1)
    for loader in data.test_dataloader():  # limited batches read the first texts and videos of the split
        assert sorted(next(iter(loader)).index.tolist()) == [0, 1, 2]


def test_texts_and_videos_have_independent_random_orders(msrvtt):
    def orders(data: MSRVTT, epoch: int = 0) -> list[list[int]]:
        loaders = data.test_dataloader()
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        return [torch.cat([batch.index for batch in loader]).tolist() for loader in loaders]

    data = data_of(msrvtt)
    found = [orders(data, epoch) for epoch in range(6)]
    assert all(sorted(order) == [0, 1, 2, 3] for pair in found for order in pair)
    assert found == [orders(data, epoch) for epoch in range(6)]
    assert len({str(texts) for texts, _ in found}) > 2
    assert any(texts != videos for texts, videos in found)
    assert found != [orders(data_of(msrvtt, seed=1), epoch) for epoch in range(6)]


def test_results_do_not_depend_on_workers(msrvtt):
    options = {"captions_per_epoch": "one", "train_sampling": "segment-random", "augmentation": "crop-flip"}
    alone, shared = (data_of(msrvtt, num_workers=count, **options) for count in (0, 2))
    state = torch.get_rng_state()
    loader, captions = shared.train_dataloader(), []
    for epoch in range(2):
        expected, found = pixels_by_video(alone.train_dataloader(), epoch), pixels_by_video(loader, epoch)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        captions.append(expected.keys())
    assert captions[0] != captions[1]
    other = data_of(msrvtt, seed=1, **options).train_dataloader()
    assert pixels_by_video(other).keys() != captions[0]
    assert torch.equal(state, torch.get_rng_state()), "reading takes random numbers away from dropout"


def test_incomplete_batches_and_a_fixed_order_are_optional(msrvtt):
    options = {"batch_size": 5, "captions_per_epoch": "one"}
    assert [len(batch) for batch in data_of(msrvtt, **options).train_dataloader()] == [5, 5]  # of 12 videos
    for reshuffle in (True, False):
        loader = data_of(msrvtt, **options, drop_last=False, reshuffle=reshuffle).train_dataloader()
        pairs = [list(pixels_by_video(loader, epoch)) for epoch in (0, 1)]
        orders = [[video for _, video in order] for order in pairs]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
        assert (orders[0] != orders[1]) == reshuffle
        assert pairs[0] != pairs[1], "captions are sampled per epoch"


def test_workers_end_with_their_evaluation(msrvtt):
    data = data_of(msrvtt, captions_per_epoch="one", num_workers=1)
    training = iter(data.train_dataloader())
    next(training)
    before = {child.pid for child in multiprocessing.active_children()}
    texts, videos = data.evaluation_dataloaders("train")  # the bank
    assert sum(len(batch) for batch in texts) == 12 * 20
    assert sum(len(batch) for batch in videos) == 12
    assert {child.pid for child in multiprocessing.active_children()} == before != set()


def test_own_evaluation_loaders_need_the_sampler_that_shares_items_equally(msrvtt):
    class OwnLoaders(MSRVTT):
        def evaluation_dataloaders(self, name):
            return [DataLoader(loader.dataset) for loader in super().evaluation_dataloaders(name)]

    data = OwnLoaders(root=str(msrvtt), frames=2, num_workers=0)
    data.setup("test")
    with pytest.raises(UserError, match="has a SequentialSampler"):
        data.test_dataloader()


def test_training_options_do_not_change_evaluation(msrvtt):
    options = {"captions_per_epoch": "one"}
    plain = data_of(msrvtt, **options)
    other = data_of(msrvtt, **options, train_sampling="tail", augmentation="rand-augment")
    frames = [pixels_by_video(data.train_dataloader()) for data in (plain, other)]
    assert frames[0].keys() == frames[1].keys()
    assert not all(torch.equal(frames[0][key], frames[1][key]) for key in frames[0])
    for a, b in zip(plain.test_dataloader()[1], other.test_dataloader()[1], strict=True):
        assert torch.equal(a.video.pixels, b.video.pixels)


def test_a_broken_video_is_named(broken):
    data = data_of(broken, num_workers=1)
    for name in ("train", "test"):
        data.read_split(name).videos[1].path.write_text("no video either")
    data.setup("fit")
    for loader in (data.train_dataloader(), data.test_dataloader()[1]):
        with pytest.raises(VideoError, match=r"video\d+\.mp4: ") as caught:
            list(loader)
        assert "Traceback" not in str(caught.value)


def test_skipped_videos_are_replaced_in_training_and_omitted_in_evaluation(broken):
    data = data_of(broken, captions_per_epoch="one", on_corrupt="skip", batch_size=11)
    data.setup("fit")
    unreadable, absent = data.read_split("train").videos[:2]
    assert absent not in data.load_split("train").videos
    (batch,) = data.train_dataloader()
    assert len(batch.video.skipped) == 1
    assert str(unreadable.path) in batch.video.skipped[0]
    ids = batch.video.video_id
    assert len(ids) == 11
    split = data.load_split("train")
    assert ids.count(split.videos[1].video_id) == 2  # its own sample and the broken one's substitute
    for index, video in zip(batch.text.index, batch.video.index, strict=True):
        assert split.texts[int(index)].video == int(video)

    batches = list(data.test_dataloader()[1])
    assert sorted(index for b in batches for index in b.index.tolist()) == [2, 3]
    named = [line for b in batches for line in b.skipped]
    assert len(named) == 2
    assert all(any(str(video.path) in line for line in named) for video in data.read_split("test").videos[:2])
    assert data.ground_truth("test").videos == 4
    first = next(iter(data_of(broken, on_corrupt="skip", eval_batch_size=2).evaluation_dataloaders("test")[1]))
    assert (len(first), len(first.skipped)) == (0, 2)
    assert first.video.pixels.shape == (0, 3, 3, 32, 32)
    for video in (broken / "msrvtt" / "videos").iterdir():
        video.write_text("not a video")
    with pytest.raises(VideoError, match="no video of the split can be read"):
        list(data_of(broken, on_corrupt="skip").train_dataloader())


def test_held_out_videos_are_not_trained_on(msrvtt):
    data = data_of(msrvtt, holdout=3)
    assert data.validation == "holdout"
    train, val = data.read_split("train"), data.read_split("val")
    assert (len(train.videos), len(val.videos)) == (9, 3)
    assert not {v.video_id for v in train.videos} & {v.video_id for v in val.videos}
    assert [text.video for text in val.texts] == [0, 1, 2]  # one caption per video, as in the test protocol
    assert "held out" in data.ground_truth("val").protocol
    assert data_of(msrvtt, holdout=3).read_split("val") == val
    assert data_of(msrvtt, holdout=3, seed=5).read_split("val") != val
    captions, every = (
        {(split.videos[text.video].video_id, text.text) for text in split.texts}
        for split in (train, data_of(msrvtt).read_split("train"))
    )
    assert captions < every
    with pytest.raises(ValueError, match="holdout 12 leaves no training videos of 12"):
        data_of(msrvtt, holdout=12).read_split("train")


def test_max_train_videos_selects_a_seeded_subset(msrvtt):
    train = data_of(msrvtt, max_train_videos=5).read_split("train")
    assert (len(train.videos), len(train.texts)) == (5, 100)
    assert data_of(msrvtt, max_train_videos=5, seed=2).read_split("train") != train
    assert len(data_of(msrvtt, max_train_videos=99).read_split("train").videos) == 12
    assert len(data_of(msrvtt, max_train_videos=1).read_split("test").videos) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 0}, "frames is 0; expected"),
        ({"audio": "whisper", "audio_seconds": 9000}, "audio_seconds is 9000; expected"),
        ({"words": 2}, "words is 2; expected"),
        ({"holdout": 5, "split": "full"}, "'full' has an official validation split; set holdout to 0"),
        ({"sampling": "segment-random"}, "set it as train_sampling"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MSRVTT(**options)


def test_the_root_can_come_from_the_environment(msrvtt, tmp_path, monkeypatch):
    monkeypatch.setenv("TVR_DATA", str(msrvtt))
    MSRVTT().setup("test")
    monkeypatch.delenv("TVR_DATA")
    with pytest.raises(MissingAssetError, match="TVR_DATA is set"):
        MSRVTT().setup("test")
    monkeypatch.chdir(tmp_path)
    for missing in (tmp_path / "nowhere", tmp_path / "nowhere" / "msrvtt"):
        with pytest.raises(MissingAssetError, match=re.escape(f"the folder {missing} does not exist")):
            MSRVTT(root="nowhere").check_present()
        missing.mkdir()


def test_training_on_test_videos_is_refused(own_data, tmp_path, capsys):
    data = MSRVTT(root=str(own_data))
    train, ids = data.folder / "MSRVTT_train.9k.csv", [video.video_id for video in data.read_split("test").videos]
    train.write_text("\n".join([train.read_text().strip(), *ids]))
    data = MSRVTT(root=str(own_data))
    for stage in ("fit", "validate", "test"):
        message = rf"train and test: 4 videos are in both \({', '.join(ids)}\); remove them from one"
        with pytest.raises(AnnotationError, match=message):
            data.setup(stage)
    options = ["--config=clip4clip", "--config=fixture", f"--data.init_args.root={own_data}"]
    assert main(["test", *options, "--trainer.accelerator=cpu", f"--results.directory={tmp_path / 'runs'}"]) == 2
    assert "tvr: " in capsys.readouterr().err
    assert not list((tmp_path / "runs").rglob("version_*"))
    train.write_text("no such column\n")
    MSRVTT(root=str(own_data)).setup("test")  # does not need the training list
    train.unlink()
    MSRVTT(root=str(own_data)).setup("test")


def test_an_official_validation_split_must_not_share_videos(synthetic, tmp_path):
    lists = shutil.copytree(synthetic("msvd", 8), tmp_path, dirs_exist_ok=True) / "msvd"
    ids = {name: (lists / f"{name}_list.txt").read_text() for name in ("train", "val", "test")}
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = ids[other].split()[0]
        (lists / f"{one}_list.txt").write_text(f"{ids[one]}{shared}\n")
        with pytest.raises(AnnotationError, match=rf"{one} and {other}: 1 video is in both \({shared}\)"):
            MSVD(root=str(tmp_path)).setup("fit")
        (lists / f"{one}_list.txt").write_text(ids[one])


DATASETS = ["ActivityNet", "Charades", "DiDeMo", "VideoFolder", "LSMDC", "MSRVTT", "MSRVTTQA", "MSVD", "VATEX"]
OVERLAYS = sorted((RECIPES / "data").glob("*.yaml"))
# A change of class keeps arguments of the same name, so an overlay must set every argument that depends on the
# dataset, and none of those that depend on the method or on the machine.
OF_THE_DATASET = {"split", "frames", "words", "captions_per_epoch", "holdout", "max_train_videos"}


def arguments(kind: type) -> set[str]:
    """Arguments that a class declares itself."""
    parameters = inspect.signature(kind).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


SHARED = arguments(TextVideoDataModule)


@pytest.mark.parametrize("name", DATASETS)
def test_hyperparameters_are_complete_and_those_of_the_recipe(name):
    in_python = getattr(datasets, name)(seed=3, batch_size=7)
    options = {"class_path": name, "init_args": {"seed": 3, "batch_size": 7}}
    by_recipe = data_from_recipe([json.dumps({"data": options})])
    assert set(in_python.hparams) >= SHARED
    assert (in_python.hparams["seed"], in_python.batch_size) == (3, 7)
    assert all(isinstance(value, str | int | float | None) for value in in_python.hparams.values())
    assert dict(in_python.hparams) == {k: v for k, v in by_recipe.hparams.items() if not k.startswith("_")}


def test_questions_do_not_take_extra_captions():
    with pytest.raises(ValueError, match="Unset extra_captions"):
        datasets.MSRVTTQA(extra_captions="captions.parquet")


def test_overlays_set_the_options_of_their_dataset_only():
    names = []
    for overlay in OVERLAYS:
        recipe = read_recipe(overlay)
        assert set(recipe) == {"data"}
        settings = recipe["data"]["init_args"]
        names.append(recipe["data"]["class_path"])
        kind = getattr(datasets, names[-1])
        assert set(settings) == OF_THE_DATASET | (arguments(kind) - SHARED)
        assert kind(**settings).directory == overlay.stem
    assert sorted([*names, "MSRVTTQA"]) == sorted(DATASETS)
