"""The data module that all datasets share: its splits, samples, orders, workers and processes."""

import multiprocessing
import re
import shutil
from pathlib import Path

import pytest
import torch
from quick_trainer import quick_trainer

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision
from tvr_lightning.testing import run_processes

# isort: split
import lightning.pytorch as pl

from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.media.container import VideoError

SMALL = {"frames": 3, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}
OF_TWO = {"frames": 2, "image_size": 16, "holdout": 3, "captions_per_epoch": "one"}  # of two processes


def data_of(root: Path, **options) -> MSRVTT:
    return MSRVTT(root=str(root), **{**SMALL, **options})


@pytest.fixture
def broken(msrvtt: Path, tmp_path: Path) -> Path:
    """The synthetic dataset with one training file and one test file that are no videos, and one of each missing."""
    shutil.copytree(msrvtt / "msrvtt", tmp_path / "msrvtt")
    data = MSRVTT(root=str(tmp_path))
    for name in ("train", "test"):
        videos = data.read_split(name).videos
        videos[0].path.write_text("not a video")
        videos[1].path.unlink()
    return tmp_path


def pixels_by_video(loader, epoch: int = 0) -> dict[tuple[int, int], torch.Tensor]:
    loader.sampler.set_epoch(epoch)
    return {
        (int(batch.text.index[i]), int(batch.video.index[i])): batch.video.video.pixels[i]
        for batch in loader
        for i in range(len(batch.text))
    }


def test_evaluation_gives_unique_texts_and_unique_videos_with_their_index(msrvtt):
    data = data_of(msrvtt)
    data.setup("test")
    truth = data.ground_truth("test")
    texts, videos = data.test_dataloader()
    text_batches, video_batches = list(texts), list(videos)
    assert all(isinstance(batch, TextBatch) for batch in text_batches)
    assert all(isinstance(batch, VideoBatch) for batch in video_batches)
    text_index = torch.cat([batch.index for batch in text_batches]).tolist()
    video_index = torch.cat([batch.index for batch in video_batches]).tolist()
    assert sorted(text_index) == list(range(truth.texts))
    assert sorted(video_index) == list(range(truth.videos))
    assert (truth.texts, truth.videos, truth.dataset, truth.split) == (4, 4, "synthetic MSR-VTT", "test")
    split = data.read_split("test")
    assert [t for batch in text_batches for t in batch.text] == [split.texts[i].text for i in text_index]
    assert [v for batch in video_batches for v in batch.video_id] == [split.videos[i].video_id for i in video_index]


def test_texts_and_videos_come_in_random_orders_of_their_own(msrvtt):
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


def test_limited_batches_read_the_first_texts_and_videos_of_the_split(msrvtt):
    data = data_of(msrvtt)
    data.trainer = quick_trainer(limit_test_batches=1)
    for loader in data.test_dataloader():
        assert sorted(next(iter(loader)).index.tolist()) == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_results_do_not_depend_on_workers_which_see_the_epoch(msrvtt, workers):
    options = {"captions_per_epoch": "one", "train_sampling": "segment-random", "augmentation": "crop-flip"}
    alone, shared = (data_of(msrvtt, num_workers=count, **options) for count in (0, workers))
    loader, captions = shared.train_dataloader(), []
    for epoch in range(2):
        expected, found = pixels_by_video(alone.train_dataloader(), epoch), pixels_by_video(loader, epoch)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        captions.append(expected.keys())
    assert captions[0] != captions[1]
    other = data_of(msrvtt, seed=1, **options).train_dataloader()
    assert pixels_by_video(other).keys() != captions[0]


def test_incomplete_batches_and_a_fixed_order_are_options(msrvtt):
    options = {"batch_size": 5, "captions_per_epoch": "one"}
    assert [len(batch) for batch in data_of(msrvtt, **options).train_dataloader()] == [5, 5]  # of 12 videos
    for reshuffle in (True, False):
        loader = data_of(msrvtt, **options, drop_last=False, reshuffle=reshuffle).train_dataloader()
        orders = [[video for _, video in pixels_by_video(loader, epoch)] for epoch in (0, 1)]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
        assert (orders[0] != orders[1]) == reshuffle
    with pytest.raises(UserError, match="batch_size 241 exceeds the 240 training samples"):
        data_of(msrvtt, batch_size=241).train_dataloader()


def test_workers_of_an_evaluation_end_with_it(msrvtt):
    data = data_of(msrvtt, captions_per_epoch="one", num_workers=1)
    training = iter(data.train_dataloader())
    next(training)
    before = {child.pid for child in multiprocessing.active_children()}
    texts, videos = data.evaluation_dataloaders("train")  # the bank
    assert sum(len(batch) for batch in texts) == 12 * 20
    assert sum(len(batch) for batch in videos) == 12
    assert {child.pid for child in multiprocessing.active_children()} == before != set()


def test_training_options_change_the_frames_of_training_only(msrvtt):
    options = {"captions_per_epoch": "one"}
    plain = data_of(msrvtt, **options)
    other = data_of(msrvtt, **options, train_sampling="tail", augmentation="rand-augment")
    frames = [pixels_by_video(data.train_dataloader()) for data in (plain, other)]
    assert frames[0].keys() == frames[1].keys()
    assert not all(torch.equal(frames[0][key], frames[1][key]) for key in frames[0])
    for a, b in zip(plain.test_dataloader()[1], other.test_dataloader()[1], strict=True):
        assert torch.equal(a.video.pixels, b.video.pixels)


def test_missing_files_stop_the_run_before_it_starts(broken):
    data = data_of(broken)
    gone = data.read_split("train").videos[1].path
    with pytest.raises(MissingAssetError, match=f"1 of the 12 video files of the train split: looked for {gone}.*skip"):
        data.setup("fit")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_an_error_that_names_it(broken, workers):
    data = data_of(broken, num_workers=workers)
    for name in ("train", "test"):  # put something undecodable where files are missing
        data.read_split(name).videos[1].path.write_text("no video either")
    data.setup("fit")
    for loader in (data.train_dataloader(), data.test_dataloader()[1]):
        with pytest.raises(VideoError, match=r"video\d+\.mp4: ") as caught:
            list(loader)
        assert "Traceback" not in str(caught.value)


def test_skipping_replaces_in_training_and_leaves_out_in_evaluation(broken):
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
    for video in data.read_split("test").videos[:2]:
        assert any(str(video.path) in line for line in named)
    assert data.ground_truth("test").videos == 4
    first = next(iter(data_of(broken, on_corrupt="skip", eval_batch_size=2).evaluation_dataloaders("test")[1]))
    assert (len(first), len(first.skipped)) == (0, 2)
    assert first.video.pixels.shape == (0, 3, 3, 32, 32)
    for video in (broken / "msrvtt" / "videos").iterdir():
        video.write_text("not a video")
    with pytest.raises(VideoError, match="no video of the split can be read"):
        list(data_of(broken, on_corrupt="skip").train_dataloader())


def test_held_out_videos_validate_and_do_not_train(msrvtt):
    data = data_of(msrvtt, holdout=3)
    assert data.validation == "holdout"
    train, val = data.read_split("train"), data.read_split("val")
    assert (len(train.videos), len(val.videos)) == (9, 3)
    assert not {v.video_id for v in train.videos} & {v.video_id for v in val.videos}
    assert len(val.texts) == 3  # one caption per video, as the test protocol has it
    assert [text.video for text in val.texts] == [0, 1, 2]
    assert "held out" in data.ground_truth("val").protocol
    again = data_of(msrvtt, holdout=3).read_split("val")
    assert again == val
    assert data_of(msrvtt, holdout=3, seed=5).read_split("val") != val
    whole = data_of(msrvtt).read_split("train")
    captions, kept = (
        {
            v.video_id: [split.texts[t].text for t in g]
            for v, g in zip(split.videos, split.texts_of_videos(), strict=True)
        }
        for split in (whole, train)
    )
    assert kept.items() <= captions.items()
    with pytest.raises(ValueError, match="holdout 12 leaves no training videos of 12"):
        data_of(msrvtt, holdout=12).read_split("train")


def test_fewer_training_videos_are_a_seeded_subset(msrvtt):
    some = data_of(msrvtt, max_train_videos=5)
    train = some.read_split("train")
    assert (len(train.videos), len(train.texts), len(some.read_split("test").videos)) == (5, 100, 4)
    assert data_of(msrvtt, max_train_videos=5, seed=2).read_split("train") != train
    assert len(data_of(msrvtt, max_train_videos=99).read_split("train").videos) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 0}, "frames is 0; it must be at least 1"),
        ({"words": 2}, "words is 2; it must be at least 3"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"holdout": -1}, "holdout is -1"),
        ({"holdout": 5, "split": "full"}, "'full' has an official validation split; set holdout to 0"),
        ({"max_train_videos": 0}, "max_train_videos is 0"),
        ({"sampling": "segment-random"}, "set it as train_sampling"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        MSRVTT(**options)


def test_the_root_comes_from_the_environment_or_is_asked_for(msrvtt, tmp_path, monkeypatch):
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


class Recorder(pl.LightningModule):
    """Notes which samples a process sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.epochs: list[list[int]] = []
        self.sizes: list[int] = []
        self.validated: list[list[int]] = [[], []]

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: PairBatch) -> torch.Tensor:
        self.epochs[-1] += batch.text.index.tolist()
        self.sizes.append(len(batch))
        return self.weight.sum()

    def validation_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int) -> None:
        self.validated[dataloader_idx] += batch.index.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank: int, root: str) -> dict[str, list]:
    model = Recorder()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=root,
        use_distributed_sampler=True,  # even so, Lightning's sampler must not take the place of ours
    )  # fmt: skip
    trainer.fit(model, datamodule=data_of(Path(root), **OF_TWO))
    return {"trained": model.epochs, "validated": model.validated, "sizes": model.sizes}


def test_two_processes_share_batches_and_validate_equally_often(msrvtt):
    first, second = run_processes(fit, 2, str(msrvtt))
    assert first["sizes"] == second["sizes"] == [2] * 4  # two epochs of two global batches of 4, halved
    loader = data_of(msrvtt, **OF_TWO).train_dataloader()
    for epoch, (ours, theirs) in enumerate(zip(first["trained"], second["trained"], strict=True)):
        loader.sampler.set_epoch(epoch)
        for k, batch in enumerate(loader):
            assert sorted(batch.text.index.tolist()) == sorted(ours[2 * k : 2 * k + 2] + theirs[2 * k : 2 * k + 2])
    for ours, theirs in zip(first["validated"], second["validated"], strict=True):
        assert len(ours) == len(theirs) == 4
        for epoch in (slice(0, 2), slice(2, 4)):  # three items on two processes: the first one comes again
            assert set(ours[epoch] + theirs[epoch]) == {0, 1, 2}
