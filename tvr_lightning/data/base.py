"""Base DataModule of all datasets: their options, and the loaders of training and evaluation."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from tvr_lightning.data.annotated import STAGES, AnnotatedDataset
from tvr_lightning.data.audio_alignment import AudioAlignment, AudioOptions, AudioSeconds
from tvr_lightning.data.batch import PairBatch, TextBatch, Tokens, VideoBatch
from tvr_lightning.data.copies import Copies, read_copies
from tvr_lightning.data.datasets import PairDataset, TextDataset, VideoDataset
from tvr_lightning.data.loader import EvaluationSampler, ReportingLoader, TrainingLoader, TrainingSampler
from tvr_lightning.data.readers import MediaReader, StoreReader, VideoReader, frame_fingerprint, text_fingerprint
from tvr_lightning.data.records import Split, SplitName
from tvr_lightning.data.recover_captions import find_captions, read_captions
from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.features import FeatureBatch
from tvr_lightning.media.augment import Augmentation
from tvr_lightning.media.preparation import Interpolation, Preparation, ResizeMode
from tvr_lightning.option_types import Count, FeaturePart, FrameSampling, Range, Role, Workers, check
from tvr_lightning.store import FeatureStore, StoreError

EvaluationLoaders = list[DataLoader[TextBatch] | DataLoader[VideoBatch]]


@dataclass(frozen=True)
class Needs:
    """Requirements of a model for its data; without a model, the options name the stored parts.

    Attributes:
        tokenize: The encoder's `caption_tokens`; None leaves captions as strings.
        patches: Whether patches of stored features are read.
        audio: Whether audio of stored features is read; None if the option `audio` decides.
    """

    tokenize: Callable[[list[str]], Tokens] | None = None
    patches: bool = False
    audio: bool | None = None


class TextVideoDataModule(AnnotatedDataset, LightningDataModule):
    """Base class of datasets, with matching pairs for training and unique texts and unique videos for evaluation.

    A subclass is one dataset. It defines its name and files (`title`, `directory`, `layout`, `required_files`), the
    `suffix` that its files omit from the names of videos, whether it has an official validation split, and how its
    splits are read (`parse_split`). Its constructor names only its own arguments and passes the others on as
    `**options`, so that each is documented only here. All are plain values, so that checkpoints store them unchanged.

    Args:
        split: variant of the dataset's split files.
        root: parent folder of all datasets, to which each appends its own `directory`; for `VideoFolder`, the folder
            itself. Default: the environment's TVR_DATA.
        frames: number of frames F per clip, at least 1; shorter clips are padded and masked.
        words: number of token positions W per caption, at least 3, including start and end; the encoder truncates to
            it.
        image_size: side length S of the square frames in pixels.
        resize_mode: method for making frames square (`Preparation`).
        interpolation: interpolation of the resizing.
        antialias: whether downscaling frames is antialiased; X-Pool and T-MASS do not.
        batch_size: number of pairs per optimization step, over all devices.
        eval_batch_size: number of texts or videos per evaluation batch, on each device.
        num_workers: number of processes that decode videos, for each loader; evaluating stored features uses none.
        sampling: rule for selecting the frames of a clip.
        train_sampling: rule for selecting frames in training, if it differs from `sampling`.
        augmentation: augmentation of the frames in training.
        drop_last: whether the last incomplete batch of an epoch is dropped.
        reshuffle: whether every epoch has a new random order; otherwise all have the order of the first.
        captions_per_epoch: samples of an epoch: "all" captions, or "one" randomly selected caption per video.
        on_corrupt: handling of missing or undecodable files: "error" stops the run; "skip" omits and reports them.
        holdout: number of training videos held out for validation, if the dataset has no official validation split.
        max_train_videos: maximum number of training videos, sampled with `seed`; all of them by default.
        seed: seed for order, selected captions, random frames, augmentation, and held-out videos.
        features: feature store written by `tvr extract`; videos and texts are read from it and not decoded.
        pixels: feature store with the part `pixels`; sampled frames are read from it instead of decoding videos.
        audio: audio encoder for which audio is read; "none" reads no audio. Stored features include their own.
        audio_alignment: alignment of audio with the frames (`AudioOptions`).
        audio_seconds: maximum length of the audio of a clip in seconds.
        extra_captions: file with additional descriptions (`data.recover_captions`), a path or a name in the dataset's
            folder; training pairs then include the descriptions of their video.
    """

    def __init__(
        self,
        *,
        split: Annotated[str, Role.DATASET],
        root: Annotated[str | None, Role.MACHINE, Role.FILE] = None,
        frames: Annotated[Count, Role.READING] = 12,
        words: Annotated[int, Range(at_least=3), Role.READING] = 32,
        image_size: Annotated[Count, Role.READING] = 224,
        resize_mode: Annotated[ResizeMode, Role.READING] = "shortest",
        interpolation: Annotated[Interpolation, Role.READING] = "bicubic",
        antialias: Annotated[bool, Role.READING] = True,
        batch_size: Annotated[Count, Role.TRAINING] = 128,
        eval_batch_size: Annotated[Count, Role.MACHINE] = 32,
        num_workers: Workers = 2,
        sampling: Annotated[FrameSampling, Role.READING] = "one-fps-uniform",
        train_sampling: Annotated[FrameSampling | None, Role.TRAINING, Role.DATASET] = None,
        augmentation: Annotated[Augmentation, Role.TRAINING] = "none",
        drop_last: Annotated[bool, Role.TRAINING] = True,
        reshuffle: Annotated[bool, Role.TRAINING] = True,
        captions_per_epoch: Annotated[Literal["all", "one"], Role.TRAINING, Role.DATASET] = "all",
        on_corrupt: Annotated[Literal["error", "skip"], Role.TRAINING, Role.EVALUATION] = "error",
        holdout: Annotated[int, Range(at_least=0), Role.DATASET] = 0,
        max_train_videos: Annotated[Count | None, Role.DATASET] = None,
        seed: Annotated[int, Range(at_least=0), Role.TRAINING] = 0,
        features: Annotated[str | None, Role.DATASET, Role.FILE] = None,
        pixels: Annotated[str | None, Role.DATASET, Role.MACHINE, Role.FILE] = None,
        audio: Annotated[Literal["none", "whisper", "wav2vec2"], Role.READING] = "none",
        audio_alignment: Annotated[AudioAlignment, Role.READING] = "duration",
        audio_seconds: Annotated[AudioSeconds, Role.READING] = 60.0,
        extra_captions: Annotated[str | None, Role.DATASET, Role.FILE] = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.root = root
        self.split = split
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.reshuffle = reshuffle
        self.captions_per_epoch = captions_per_epoch
        self.holdout = holdout
        self.max_train_videos = max_train_videos
        self.seed = seed
        self.extra_captions = extra_captions
        self.frames = frames
        self.words = words
        self.preparation = Preparation(image_size, interpolation, resize_mode, antialias)
        self.sampling = sampling
        self.train_sampling = train_sampling or sampling
        self.augmentation = augmentation
        self.on_corrupt = on_corrupt
        self.features = features
        self.pixels = pixels
        check(self, **self.hparams)
        self.audio = None if audio == "none" else AudioOptions(audio, audio_alignment, audio_seconds)
        self.check_reading()
        if self.holdout and self.has_official_validation:
            raise UserError(
                f"holdout {self.holdout}: {type(self).__name__} with split {self.split!r} has an official validation "
                "split; set holdout to 0 to use it"
            )
        self.needs = Needs()
        self.training_loader: TrainingLoader | None = None
        self._resume_at: dict[str, int] | None = None
        self._read: dict[SplitName, Split] = {}
        self._loaded: dict[SplitName, Split] = {}
        self._stores: dict[tuple[FeaturePart, ...], FeatureStore] = {}

    # Reading

    def check_reading(self) -> None:
        """Raise a UserError if options of reading exclude each other."""
        if self.stored_in is not None and self.train_sampling != self.sampling:
            stored = "pixels" if self.features is None else "features"
            raise UserError(
                f"{stored} {self.stored_in!r} fixes the frames of every clip, so train_sampling "
                f"{self.train_sampling!r} cannot apply; set it to null, or unset {stored}"
            )
        if self.features is not None and self.augmentation != "none":
            raise UserError(
                f"features {self.features!r} are those of unchanged frames, so augmentation {self.augmentation!r} "
                "cannot apply; set it to none (recipes/features.yaml does), or unset features"
            )
        if self.pixels is not None and (self.features is not None or self.audio is not None):
            other = "audio" if self.features is None else "features"
            raise UserError(f"pixels {self.pixels!r} are stored frames without {other}; unset pixels or {other}")
        if self.augmentation == "crop-flip" and not self.preparation.is_square:
            raise UserError(
                "augmentation 'crop-flip' makes frames square, but the encoder takes them in their own size; set it to "
                "none or rand-augment"
            )
        if self.sampling == "segment-random":
            raise UserError(
                "sampling 'segment-random' would make evaluation random; set it as train_sampling and keep a "
                "deterministic sampling such as 'segment-centers' for evaluation"
            )

    @property
    def stored_in(self) -> str | None:
        """Feature store that is read instead of the videos, of features or of frames; None if there is none."""
        return self.features or self.pixels

    def check_present(self, stage: str | None = None, annotations_only: bool = False) -> None:
        """Raise MissingAssetError unless annotation files, videos and captions of a stage (None: all) exist."""
        files = dict.fromkeys(path for name in STAGES[stage] for path in self.required_files(self.source_of(name)))
        absent = [f"{path.name}: looked for {path}" for path in files if not path.is_file()]
        if not self.folder.is_dir():
            folder = self.folder if self.folder.parent.is_dir() else self.folder.parent
            absent.insert(0, f"the folder {folder.absolute()} does not exist; check data.init_args.root")
        needs_videos = not annotations_only and self.stored_in is None
        if needs_videos and not (self.video_root.is_dir() and any(self.video_root.iterdir())):
            absent.append(f"the videos: looked for files in {self.video_root}")
        if absent:
            raise self.incomplete(absent)
        if self.extra_captions is not None and "train" in STAGES[stage] and not annotations_only:
            find_captions(self.extra_captions, self.folder)

    @cached_property
    def copies(self) -> Copies | None:
        """Manifest of the folder, if it contains copies of another folder (`tvr data compress`)."""
        return read_copies(self.folder)

    @property
    def store(self) -> FeatureStore:
        """Feature store with the parts that the run reads, after checking that they fit the options."""
        assert self.stored_in is not None
        uses_audio = self.audio is not None if self.needs.audio is None else self.needs.audio
        optional: dict[FeaturePart, bool] = {"patches": self.needs.patches, "audio": uses_audio}
        parts: tuple[FeaturePart, ...] = ("text", "frames", *(part for part, used in optional.items() if used))
        if self.pixels is not None:
            parts = ("pixels",)
        if parts not in self._stores:
            copies = "" if self.copies is None else self.copies.how.describe()
            frames = frame_fingerprint(self.frames, self.preparation, self.sampling, copies)
            audio = {} if self.audio is None else {"preprocessing": self.audio.describe()}
            expected = dict.fromkeys(parts, frames) | {
                "text": text_fingerprint(self.words),
                "audio": {"sampling": frames["sampling"], **audio},
            }
            store = FeatureStore(self.stored_in, parts)
            for part in parts:
                store.require(part, expected[part])
            store.verify()
            self._stores[parts] = store
        return self._stores[parts]

    def video_reader(self, training: bool) -> VideoReader:
        """Return the reader of single videos and texts; training has its own frame sampling and augmentation."""
        sampling = self.train_sampling if training else self.sampling
        augmentation = self.augmentation if training else "none"
        media = MediaReader(
            self.frames, self.preparation, sampling, augmentation, self.audio, self.on_corrupt, self.needs.tokenize
        )
        if self.stored_in is None:
            return media
        return StoreReader(self.store, self.directory, media if self.pixels else None)

    def load_split(self, name: SplitName) -> Split:
        """Return a split that the loaders serve, after checking that its video files exist and copies are up to date.

        With `on_corrupt: skip`, training omits videos whose files are missing. Evaluation keeps their positions, so
        that texts and videos are numbered as in the annotation files.
        """
        if name not in self._loaded:
            split = self.read_split(name)
            absent = self.video_reader(training=False).absent(split)
            if self.stored_in is None and self.copies is not None:
                self.copies.check(video.path for i, video in enumerate(split.videos) if i not in absent)
            if absent and self.on_corrupt == "error":
                count = f"{len(absent)} of the {len(split.videos)} video files of the {split.name} split"
                hint = "To continue without them, set data.init_args.on_corrupt to skip"
                if self.stored_in is None:
                    listed = abbreviated([split.videos[i].path for i in absent])
                    raise self.incomplete([f"{count}: looked for {listed}. {hint}"])
                listed = abbreviated([f"{split.videos[i].path}: {reason}" for i, reason in absent.items()])
                raise StoreError(f"{count} are not in the feature store {self.stored_in}: {listed}. {hint}")
            if absent and name == "train":
                split = split.take_videos([i for i in range(len(split.videos)) if i not in absent])
            self._loaded[name] = split
        return self._loaded[name]

    def with_other_captions(self, change: Callable[[Split], Split]) -> Self:
        """Return this dataset with changed splits and nothing derived from the original ones. Call its `setup` next."""
        other = copy.copy(self)
        other.__dict__ = {
            name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
            for name, value in vars(self).items()
            if not isinstance(getattr(type(self), name, None), cached_property)
        }
        for name in ("_read", "_loaded"):  # reading the training split again would take long
            setattr(other, name, {split: found for split, found in getattr(self, name).items() if split == "train"})
        for name in ("build_split", "read_split"):  # a subclass may keep captions of both
            read = getattr(other, name)
            setattr(other, name, lambda *args, read=read, **options: change(read(*args, **options)))
        return other

    # Loaders

    @override
    def setup(self, stage: str | None = None) -> None:
        needs = getattr(self.trainer.lightning_module, "needs", None) if self.trainer else None
        self.needs = needs or self.needs
        self.check_present(stage)
        for name in STAGES[stage]:
            self.load_split(name)
        self.check_disjoint()

    @override
    def train_dataloader(self) -> DataLoader[PairBatch]:
        sharing = self._sharing()
        # Lightning overfits the same batches in every epoch.
        reshuffle = self.reshuffle and not getattr(self.trainer, "overfit_batches", 0)
        split = self.load_split("train")
        captions = None
        if self.extra_captions is not None:
            captions = read_captions(find_captions(self.extra_captions, self.folder))
            captions.require([video.video_id for video in split.videos])
        dataset = PairDataset(
            split,
            self.video_reader(training=True),
            one_caption=self.captions_per_epoch == "one",
            seed=self.seed,
            skip=self.on_corrupt == "skip",
            captions=captions,
            tokenize=self.needs.tokenize,
        )
        sampler = TrainingSampler(
            len(dataset), self.batch_size, seed=self.seed, drop_last=self.drop_last, reshuffle=reshuffle, **sharing
        )
        sampler.set_epoch(self.trainer.current_epoch if self.trainer else 0)
        batch_size = self.batch_size // sharing["replicas"]
        self.training_loader = TrainingLoader.create(dataset, sampler, batch_size, self.num_workers, self.seed)
        self._resume_training()
        return self.training_loader

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.training_loader is None else {"training": self.training_loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is None or self.trainer.state.fn == "fit":
            self._resume_at = state_dict.get("training")
            self._resume_training()

    def _resume_training(self) -> None:
        # FSDP restores checkpoints after it has built the loader.
        if self.training_loader is not None and self._resume_at is not None:
            self.training_loader.load_state_dict(self._resume_at)
            self._resume_at = None

    def evaluation_dataloaders(self, name: SplitName) -> EvaluationLoaders:
        """Return the loaders [unique texts, unique videos] of a split; for "train", the bank of a normalization.

        Every process gets the same number of batches. Repeated items have the index of the first one.
        """
        split = self.load_split(name)
        reader = self.video_reader(training=False)
        videos = VideoDataset(split, reader, skip=self.on_corrupt == "skip")
        loaders: EvaluationLoaders = []
        # Reading texts or stored features takes less time than starting worker processes.
        for dataset, workers in (TextDataset(split, reader), 0), (videos, 0 if self.features else self.num_workers):
            sampler = EvaluationSampler(len(dataset), **self._sharing())
            loaders.append(ReportingLoader.create(dataset, sampler, self.eval_batch_size, workers, self.seed))
        return loaders

    @override
    def val_dataloader(self) -> EvaluationLoaders:
        return self._shuffled("val", "limit_val_batches")

    @override
    def test_dataloader(self) -> EvaluationLoaders:
        return self._shuffled("test", "limit_test_batches")

    @override
    def predict_dataloader(self) -> EvaluationLoaders:
        return self._shuffled("test", "limit_predict_batches")

    def _shuffled(self, name: SplitName, limit: str) -> EvaluationLoaders:
        """Return evaluation loaders in independent random orders, so that positions reveal nothing about pairs.

        If the trainer limits batches, the texts and videos are the same as in the order of the split.
        """
        loaders = self.evaluation_dataloaders(name)
        batches = getattr(self.trainer, limit, 1.0) if self.trainer else 1.0
        for stream, loader in enumerate(loaders):
            sampler = EvaluationSampler.of(loader)
            read = batches if isinstance(batches, int) else int(batches * len(loader))
            first = read * self.eval_batch_size * sampler.num_replicas
            sampler.shuffled = [self.seed, stream], first
        return loaders

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(batch, FeatureBatch):  # Lightning would wait for every tensor of a record
            return batch.to(device, non_blocking=device.type == "cuda")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _sharing(self) -> dict[str, int]:
        # The strategy knows the data-parallel processes; with tensor parallelism, there are fewer of them than devices.
        shares = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) if self.trainer else None
        return {"replicas": shares["num_replicas"], "rank": shares["rank"]} if shares else {"replicas": 1, "rank": 0}
