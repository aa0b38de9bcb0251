import multiprocessing
import re
import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.records import AnnotationError, Problem
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.media.container import VideoError

SMALL = {"frames": 3, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}


@pytest.fixture
def broken(synthetic_msrvtt: Path, tmp_path: Path) -> Path:
    """The synthetic dataset with one training file and one test file that are no videos, and one of each missing."""
    shutil.copytree(synthetic_msrvtt / "msrvtt", tmp_path / "msrvtt")
    data = MSRVTT(root=str(tmp_path))
    for name in ("train", "test"):
        videos = data.read_split(name).videos
        videos[0].path.write_text("not a video")
        videos[1].path.unlink()
    return tmp_path


def pixels_by_video(data: MSRVTT, epoch: int = 0) -> dict[tuple[int, int], torch.Tensor]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return {
        (int(batch.text.index[i]), int(batch.video.index[i])): batch.video.video.pixels[i]
        for batch in loader
        for i in range(len(batch.text))
    }


def test_training_batches_hold_matching_pairs(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), **SMALL)
    data.setup("fit")
    split = data.load_split("train")
    batches = list(data.train_dataloader())
    assert len(batches) == len(split.texts) // 4
    seen = set()
    for batch in batches:
        assert isinstance(batch, PairBatch)
        assert batch.video.video.pixels.shape == (4, 3, 3, 32, 32)
        assert batch.video.video.pixels.dtype == torch.uint8
        assert batch.video.video.frame_mask.shape == (4, 3)
        for text, index, video, video_id in zip(
            batch.text.text, batch.text.index, batch.video.index, batch.video.video_id, strict=True
        ):
            assert split.texts[int(index)].text == text
            assert split.texts[int(index)].video == int(video)
            assert split.videos[int(video)].video_id == video_id
            seen.add(int(index))
    assert seen == set(range(len(split.texts)))


def test_evaluation_gives_unique_texts_and_unique_videos_with_their_index(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), **SMALL)
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


def test_texts_and_videos_come_in_random_orders_of_their_own(synthetic_msrvtt):
    def orders(data: MSRVTT, epoch: int = 0) -> list[list[int]]:
        loaders = data.test_dataloader()
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        return [torch.cat([batch.index for batch in loader]).tolist() for loader in loaders]

    data = MSRVTT(root=str(synthetic_msrvtt), **SMALL)
    found = [orders(data, epoch) for epoch in range(6)]
    assert all(sorted(order) == [0, 1, 2, 3] for pair in found for order in pair)
    assert found == [orders(data, epoch) for epoch in range(6)]
    assert len({str(texts) for texts, _ in found}) > 2
    assert any(texts != videos for texts, videos in found)
    assert found != [orders(MSRVTT(root=str(synthetic_msrvtt), **SMALL, seed=1), epoch) for epoch in range(6)]


def test_limited_batches_read_the_first_texts_and_videos_of_the_split(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), **SMALL)
    data.trainer = pl.Trainer(accelerator="cpu", limit_test_batches=1, logger=False, enable_checkpointing=False)
    for loader in data.test_dataloader():
        assert sorted(next(iter(loader)).index.tolist()) == [0, 1, 2]


def test_the_bank_is_the_training_split(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), **SMALL)
    data.setup("fit")
    texts, videos = data.evaluation_dataloaders("train")
    assert sum(len(batch) for batch in texts) == 12 * 20
    assert sum(len(batch) for batch in videos) == 12


def test_results_do_not_depend_on_the_number_of_workers(synthetic_msrvtt):
    options = {
        **SMALL,
        "root": str(synthetic_msrvtt),
        "captions_per_epoch": "one",
        "train_sampling": "segment-random",
        "augmentation": "crop-flip",
    }
    alone = pixels_by_video(MSRVTT(**options))
    shared = pixels_by_video(MSRVTT(**{**options, "num_workers": 2}))
    assert alone.keys() == shared.keys()
    assert all(torch.equal(alone[key], shared[key]) for key in alone)
    other_epoch = pixels_by_video(MSRVTT(**options), epoch=1)
    assert other_epoch.keys() != alone.keys()
    other_seed = pixels_by_video(MSRVTT(**{**options, "seed": 1}))
    assert other_seed.keys() != alone.keys()


def test_one_caption_is_drawn_per_video_and_epoch(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), captions_per_epoch="one", **SMALL)
    epochs = [pixels_by_video(data, epoch) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(video for _, video in epoch) == list(range(12))
    drawn = [{video: text for text, video in epoch} for epoch in epochs]
    assert drawn[0] != drawn[1] != drawn[2]


def test_incomplete_batches_and_a_fixed_order_are_options(synthetic_msrvtt):
    options = {**SMALL, "root": str(synthetic_msrvtt), "batch_size": 5, "captions_per_epoch": "one"}
    assert [len(batch) for batch in MSRVTT(**options).train_dataloader()] == [5, 5]  # of twelve videos
    kept = MSRVTT(**options, drop_last=False)
    assert [len(batch) for batch in kept.train_dataloader()] == [5, 5, 2]
    orders = {}
    for reshuffle in (True, False):
        data = MSRVTT(**options, drop_last=False, reshuffle=reshuffle)
        orders[reshuffle] = [[video for _, video in pixels_by_video(data, epoch)] for epoch in (0, 1)]
    assert orders[True][0] != orders[True][1]
    assert orders[False][0] == orders[False][1] == orders[True][0]


def test_persistent_workers_see_the_epoch(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), captions_per_epoch="one", **{**SMALL, "num_workers": 1})
    loader = data.train_dataloader()
    captions = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        captions.append({int(i) for batch in loader for i in batch.text.index})
    alone = MSRVTT(root=str(synthetic_msrvtt), captions_per_epoch="one", **SMALL)
    assert captions == [{text for text, _ in pixels_by_video(alone, epoch)} for epoch in range(2)]


def test_workers_of_an_evaluation_end_with_it(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), captions_per_epoch="one", **{**SMALL, "num_workers": 1})
    training = iter(data.train_dataloader())
    next(training)
    before = {child.pid for child in multiprocessing.active_children()}
    _, videos = data.evaluation_dataloaders("train")
    assert len(list(videos))
    assert {child.pid for child in multiprocessing.active_children()} == before != set()


def test_training_options_change_the_frames_of_training_only(synthetic_msrvtt):
    plain = MSRVTT(root=str(synthetic_msrvtt), captions_per_epoch="one", **SMALL)
    other = MSRVTT(
        root=str(synthetic_msrvtt),
        captions_per_epoch="one",
        train_sampling="tail",
        augmentation="rand-augment",
        **SMALL,
    )
    differing = [
        not torch.equal(a, b)
        for a, b in zip(pixels_by_video(plain).values(), pixels_by_video(other).values(), strict=True)
    ]
    assert any(differing)
    for a, b in zip(plain.test_dataloader()[1], other.test_dataloader()[1], strict=True):
        assert torch.equal(a.video.pixels, b.video.pixels)


def test_missing_files_stop_the_run_before_it_starts(broken):
    data = MSRVTT(root=str(broken), **SMALL)
    gone = data.read_split("train").videos[1].path
    with pytest.raises(MissingAssetError, match=f"1 of the 12 video files of the train split: looked for {gone}.*skip"):
        data.setup("fit")


def test_a_broken_file_is_an_error_that_names_it(broken):
    data = MSRVTT(root=str(broken), **SMALL)
    (broken / "msrvtt" / "videos").joinpath("x").touch()
    for name in ("train", "test"):  # put something undecodable where files are missing
        data.read_split(name).videos[1].path.write_text("no video either")
    data.setup("fit")
    with pytest.raises(VideoError, match=r"video\d+\.mp4"):
        list(data.train_dataloader())
    with pytest.raises(VideoError, match=r"video\d+\.mp4"):
        list(data.test_dataloader()[1])
    workers = MSRVTT(root=str(broken), **{**SMALL, "num_workers": 1})
    with pytest.raises(VideoError, match=r"video\d+\.mp4: ") as caught:
        list(workers.test_dataloader()[1])
    assert "Traceback" not in str(caught.value)


def test_skipping_replaces_in_training_and_leaves_out_in_evaluation(broken):
    data = MSRVTT(root=str(broken), captions_per_epoch="one", on_corrupt="skip", **{**SMALL, "batch_size": 11})
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


def test_a_batch_of_which_everything_is_skipped_is_empty_but_well_formed(broken):
    data = MSRVTT(root=str(broken), on_corrupt="skip", **{**SMALL, "eval_batch_size": 2})
    first = next(iter(data.evaluation_dataloaders("test")[1]))
    assert len(first) == 0
    assert first.video.pixels.shape == (0, 3, 3, 32, 32)
    assert len(first.skipped) == 2


def test_nothing_readable_is_an_error_even_when_skipping(synthetic_msrvtt, tmp_path):
    shutil.copytree(synthetic_msrvtt / "msrvtt", tmp_path / "msrvtt")
    for video in (tmp_path / "msrvtt" / "videos").iterdir():
        video.write_text("not a video")
    data = MSRVTT(root=str(tmp_path), on_corrupt="skip", **SMALL)
    with pytest.raises(VideoError, match="no video of the split can be read"):
        list(data.train_dataloader())


def test_held_out_videos_validate_and_do_not_train(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), holdout=3, **SMALL)
    assert data.validation == "holdout"
    train, val = data.read_split("train"), data.read_split("val")
    assert (len(train.videos), len(val.videos)) == (9, 3)
    assert not {v.video_id for v in train.videos} & {v.video_id for v in val.videos}
    assert len(val.texts) == 3  # one caption per video, as the test protocol has it
    assert [text.video for text in val.texts] == [0, 1, 2]
    assert "held out" in data.ground_truth("val").protocol
    again = MSRVTT(root=str(synthetic_msrvtt), holdout=3, **SMALL).read_split("val")
    assert again == val
    assert MSRVTT(root=str(synthetic_msrvtt), holdout=3, seed=5, **SMALL).read_split("val") != val
    whole = MSRVTT(root=str(synthetic_msrvtt), **SMALL).read_split("train")
    captions = {
        v.video_id: [whole.texts[t].text for t in g] for v, g in zip(whole.videos, whole.texts_of_videos(), strict=True)
    }
    for video, group in zip(train.videos, train.texts_of_videos(), strict=True):
        assert [train.texts[t].text for t in group] == captions[video.video_id]


def test_fewer_training_videos_are_a_seeded_subset(synthetic_msrvtt):
    some = MSRVTT(root=str(synthetic_msrvtt), max_train_videos=5, **SMALL)
    assert len(some.read_split("train").videos) == 5
    assert len(some.read_split("train").texts) == 100
    assert len(some.read_split("test").videos) == 4
    other = MSRVTT(root=str(synthetic_msrvtt), max_train_videos=5, seed=2, **SMALL)
    assert other.read_split("train") != some.read_split("train")
    assert len(MSRVTT(root=str(synthetic_msrvtt), max_train_videos=99, **SMALL).read_split("train").videos) == 12


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


def test_more_held_out_than_there_are_is_refused(synthetic_msrvtt):
    with pytest.raises(ValueError, match="holdout 12 leaves no training videos of 12"):
        MSRVTT(root=str(synthetic_msrvtt), holdout=12).read_split("train")


def test_the_root_comes_from_the_environment_or_is_asked_for(synthetic_msrvtt, monkeypatch):
    monkeypatch.setenv("TVR_DATA", str(synthetic_msrvtt))
    MSRVTT().setup("test")
    monkeypatch.delenv("TVR_DATA")
    with pytest.raises(MissingAssetError, match="TVR_DATA is set"):
        MSRVTT().setup("test")


def test_a_batch_larger_than_the_data_is_refused(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), **{**SMALL, "batch_size": 241})
    with pytest.raises(UserError, match="batch_size 241 exceeds the 240 training samples"):
        data.train_dataloader()


def test_hyperparameters_are_plain_values(synthetic_msrvtt):
    data = MSRVTT(root=str(synthetic_msrvtt), **SMALL)
    assert dict(data.hparams)["frames"] == 3
    assert dict(data.hparams)["sampling"] == "one-fps-uniform"
    assert all(value is None or isinstance(value, str | int | float) for value in data.hparams.values())


def test_many_problems_are_quoted_in_part_and_counted():
    problems = [Problem("a.csv", f"row {i}", "malformed", "wrong", "mend it") for i in range(8)]
    assert "and 3 more problems" in str(AnnotationError(problems))


class Recorder(pl.LightningModule):
    """Notes which samples every epoch brings."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.epochs: list[list[int]] = []
        self.validated: list[list[int]] = [[], []]

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: PairBatch) -> torch.Tensor:
        self.epochs[-1] += batch.text.index.tolist()
        return self.weight.sum()

    def validation_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int) -> None:
        self.validated[dataloader_idx] += batch.index.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_trains_and_validates_on_it(synthetic_msrvtt, tmp_path):
    data = MSRVTT(root=str(synthetic_msrvtt), captions_per_epoch="one", **SMALL)
    model = Recorder()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, datamodule=data)
    split = data.load_split("train")
    for epoch in model.epochs:
        assert sorted(split.texts[text].video for text in epoch) == list(range(12))
    assert model.epochs[0] != model.epochs[1]
    assert [sorted(places) for places in model.validated] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2


def test_a_root_that_does_not_exist_is_named_with_its_full_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingAssetError, match=re.escape(f"the folder {tmp_path / 'nowhere'} does not exist")):
        MSRVTT(root="nowhere").check_present()
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(MissingAssetError, match=re.escape(f"the folder {tmp_path / 'nowhere' / 'msrvtt'} does not")):
        MSRVTT(root="nowhere").check_present()
