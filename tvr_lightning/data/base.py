"""Base DataModule of all datasets: splits, checks and loaders. A dataset adds its files and split rules."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from tvr_lightning.data.audio_alignment import AudioAlignment, AudioOptions
from tvr_lightning.data.batch import PairBatch, TextBatch, Tokens, VideoBatch
from tvr_lightning.data.compress import Copies, read_copies
from tvr_lightning.data.datasets import PairDataset, TextDataset, VideoDataset
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.data.loader import EvaluationSampler, ReportingLoader, TrainingLoader, TrainingSampler
from tvr_lightning.data.readers import MediaReader, StoreReader, VideoReader, frame_fingerprint, text_fingerprint
from tvr_lightning.data.records import (
    SYNTHETIC,
    SYNTHETIC_FILE,
    AnnotationError,
    Findings,
    Problem,
    Span,
    Split,
    SplitName,
    TextRecord,
    VideoRecord,
    duplicates,
    hold_out,
    shared_videos,
    tidy,
)
from tvr_lightning.data.recover_captions import find_captions, read_captions
from tvr_lightning.data.video_files import VideoFiles
from tvr_lightning.errors import MissingAssetError, UserError, abbreviated
from tvr_lightning.features import FeatureBatch
from tvr_lightning.media.augment import Augmentation
from tvr_lightning.media.preparation import Interpolation, Preparation, ResizeMode
from tvr_lightning.option_types import Count, FrameSampling, Range, Workers, check
from tvr_lightning.store import FeatureStore, Part, StoreError

EvaluationLoaders = list[DataLoader[TextBatch] | DataLoader[VideoBatch]]
STAGES: dict[str | None, tuple[SplitName, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("test",),
    None: ("train", "val", "test"),
}


class TextVideoDataModule(LightningDataModule, ABC):
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

    title: ClassVar[str]
    directory: ClassVar[str]
    layout: ClassVar[str]
    suffix: ClassVar[str] = ""
    has_official_validation: bool = False
    """Whether the chosen split has an official validation split that differs from the test split."""
    one_caption_evaluation: bool = True
    """Whether the dataset's protocol evaluates one text per video."""
    training_set: str | None = None
    """Name of the chosen training videos if several sets of them share one test set."""

    def __init__(
        self,
        *,
        split: str,
        root: str | None = None,
        frames: Count = 12,
        words: Annotated[int, Range(at_least=3)] = 32,
        image_size: int = 224,
        resize_mode: ResizeMode = "shortest",
        interpolation: Interpolation = "bicubic",
        antialias: bool = True,
        batch_size: Count = 128,
        eval_batch_size: Count = 32,
        num_workers: Workers = 2,
        sampling: FrameSampling = "one-fps-uniform",
        train_sampling: FrameSampling | None = None,
        augmentation: Augmentation = "none",
        drop_last: bool = True,
        reshuffle: bool = True,
        captions_per_epoch: Literal["all", "one"] = "all",
        on_corrupt: Literal["error", "skip"] = "error",
        holdout: Annotated[int, Range(at_least=0)] = 0,
        max_train_videos: Count | None = None,
        seed: Annotated[int, Range(at_least=0)] = 0,
        features: str | None = None,
        pixels: str | None = None,
        audio: Literal["none", "whisper", "wav2vec2"] = "none",
        audio_alignment: AudioAlignment = "duration",
        audio_seconds: float = 60.0,
        extra_captions: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.root = root
        self.split = split
        self.frames = frames
        self.words = words
        self.preparation = Preparation(image_size, interpolation, resize_mode, antialias)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.sampling = sampling
        self.train_sampling = train_sampling or sampling
        self.augmentation = augmentation
        self.drop_last = drop_last
        self.reshuffle = reshuffle
        self.captions_per_epoch = captions_per_epoch
        self.on_corrupt = on_corrupt
        self.holdout = holdout
        self.max_train_videos = max_train_videos
        self.seed = seed
        self.features = features
        self.pixels = pixels
        self.stored_in = features or pixels
        self.extra_captions = extra_captions
        self.audio = None if audio == "none" else AudioOptions(audio, audio_alignment, audio_seconds)
        self.tokenise: Callable[[list[str]], Tokens] | None = None  # a model sets its encoder's `caption_tokens`
        self.training_loader: TrainingLoader | None = None
        self._resume_at: dict[str, int] | None = None
        self._read: dict[SplitName, Split] = {}
        self._loaded: dict[SplitName, Split] = {}
        self._stores: dict[tuple[Part, ...], FeatureStore] = {}
        check(self, **self.hparams)
        if self.holdout and self.has_official_validation:
            raise UserError(
                f"holdout {self.holdout}: {type(self).__name__} with split {self.split!r} has an official validation "
                "split; set holdout to 0 to use it"
            )
        stored = "pixels" if self.features is None else "features"
        if self.stored_in is not None and (self.augmentation != "none" or self.train_sampling != self.sampling):
            raise UserError(
                f"{stored} {self.stored_in!r} fixes the frames of every clip, so augmentation {self.augmentation!r} "
                f"and train_sampling {self.train_sampling!r} cannot apply; set augmentation to none and train_sampling "
                f"to null (recipes/features.yaml does), or unset {stored}"
            )
        if self.pixels is not None and (self.features is not None or self.audio is not None):
            other = "audio" if self.features is None else "features"
            raise UserError(f"pixels {self.pixels!r} are stored frames without {other}; unset pixels or {other}")
        if self.sampling == "segment-random":
            raise UserError(
                "sampling 'segment-random' would make evaluation random; set it as train_sampling and keep a "
                "deterministic sampling such as 'segment-centres' for evaluation"
            )

    # Properties of the dataset

    @property
    def official_splits(self) -> tuple[SplitName, ...]:
        """Splits in the annotation files."""
        return STAGES[None] if self.has_official_validation else ("train", "test")

    @abstractmethod
    def required_files(self, name: SplitName) -> list[Path]:
        """Annotation files that `parse_split(name)` reads."""

    @property
    def video_root(self) -> Path:
        """Folder of the videos, which are directly in it or in subfolders."""
        return self.folder / "videos"

    @abstractmethod
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        """Read a split from the annotation files and add all their problems to `findings`.

        Called for "val" only if `has_official_validation`. Raises AnnotationError if a file cannot be parsed further.
        """

    @cached_property
    def video_files(self) -> VideoFiles:
        """Files in `video_root` by the names in the annotation files."""
        return VideoFiles(self.video_root, self.suffix)

    def find_video(self, video_id: str) -> Path:
        """Return the path of a video, or its expected path if there is no such file."""
        return self.video_files.find(video_id)

    def build_split(
        self,
        name: SplitName,
        protocol: str,
        captions: Mapping[str, Sequence[str]],
        findings: Findings,
        source: Path,
        *,
        file: Path | None = None,
        ids: Iterable[str] | None = None,
        spans: Mapping[str, Span] | None = None,
        paragraph: bool = False,
    ) -> Split:
        """Return the split with these videos and their captions, and report repeated IDs, missing and empty captions.

        Args:
            name: Name of the split.
            protocol: Protocol under which results are published.
            captions: Captions by video ID.
            findings: Collector of problems.
            source: File that lists the videos.
            file: File with the captions, if it is another one.
            ids: IDs of the videos as listed; by default those of `captions`.
            spans: Spans in seconds of the videos that are parts of their files.
            paragraph: Whether the captions of a video are joined into one text.
        """
        file, spans, listed = file or source, spans or {}, list(captions if ids is None else ids)
        findings.problems += duplicates(source, listed)
        videos: list[VideoRecord] = []
        texts: list[TextRecord] = []
        for index, video in enumerate(dict.fromkeys(listed)):
            videos.append(VideoRecord(video, self.find_video(video), spans.get(video)))
            found = [tidy(text) for text in captions.get(video, [])]
            for number, text in enumerate(found):
                if not text:
                    entry, fix = f"{video}, caption {number}", "write a caption or remove the entry"
                    findings.add(file, entry, "empty-caption", "the caption is empty", fix)
            if not found:
                fix = f"add its captions there, or remove it from {source.name}"
                findings.add(file, video, "video-without-caption", "the video has no captions", fix)
            texts += [TextRecord(text, index) for text in ([" ".join(found)] if paragraph else found) if text]
        if not videos:
            findings.add(source, "whole file", "malformed", "lists no videos", "download the file again")
        return Split(name, protocol, videos, texts)

    # Location of the data

    @property
    def folder(self) -> Path:
        """Folder of the dataset in `root` or TVR_DATA, one of which must be set."""
        root = self.root or os.environ.get("TVR_DATA")
        if not root:
            unset = "neither data.init_args.root nor the environment variable TVR_DATA is set"
            raise self.incomplete([f"the parent folder: {unset}"])
        return Path(root).expanduser() / self.directory

    @property
    def warnings(self) -> list[str]:
        """Warnings of every result on this dataset: `SYNTHETIC` if `tvr data synth` wrote its folder."""
        return [SYNTHETIC] if (self.folder / SYNTHETIC_FILE).is_file() else []

    @property
    def full_title(self) -> str:
        """Title of the dataset, with the prefix "synthetic" for a synthetic dataset."""
        return f"synthetic {self.title}" if self.warnings else self.title

    def check_present(self, stage: str | None = None, annotations_only: bool = False) -> None:
        """Raise MissingAssetError unless annotation files, videos and captions of a stage (None: all) exist."""
        sources = dict.fromkeys(self._source(name) for name in STAGES[stage])
        files = dict.fromkeys(path for name in sources for path in self.required_files(name))
        absent = [f"{path.name}: looked for {path}" for path in files if not path.is_file()]
        needs_videos = not annotations_only and self.stored_in is None
        if needs_videos and not (self.video_root.is_dir() and any(self.video_root.iterdir())):
            absent.append(f"the videos: looked for files in {self.video_root}")
        if absent and not self.folder.is_dir():
            folder = self.folder if self.folder.parent.is_dir() else self.folder.parent
            absent.insert(0, f"the folder {folder.absolute()} does not exist; check data.init_args.root")
        if absent:
            raise self.incomplete(absent)
        if self.extra_captions is not None and "train" in STAGES[stage] and not annotations_only:
            find_captions(self.extra_captions, self.folder)

    def incomplete(self, absent: list[str]) -> MissingAssetError:
        """Return the error for missing files, which are listed one sentence each, with the expected layout."""
        lines = [f"The data in {self.directory} is incomplete:", *(f"  - {line}" for line in absent)]
        return MissingAssetError("\n".join([*lines, "Expected layout:", self.layout]))

    # Splits

    @property
    def validation(self) -> Literal["official", "holdout", "test"]:
        """Source of `val`: the official split, held-out training videos, or the test split as in the papers."""
        if self.has_official_validation:
            return "official"
        return "holdout" if self.holdout else "test"

    def _source(self, name: SplitName) -> SplitName:
        """Return the split of the annotation files from which `name` is built."""
        sources: dict[str, SplitName] = {"official": "val", "holdout": "train", "test": "test"}
        return sources[self.validation] if name == "val" else name

    def examine_split(self, name: SplitName) -> tuple[Split | None, Findings]:
        """Read a split from the annotation files, and return it (None if it cannot be read) with all findings."""
        findings = Findings()
        try:
            return self.parse_split(name, findings), findings
        except AnnotationError as error:
            findings.problems += error.problems
            return None, findings

    def read_split(self, name: SplitName) -> Split:
        """Return a split as defined by the annotation files and the options `holdout` and `max_train_videos`.

        `validation` defines "val"; if it is "test", the returned split is named test. An AnnotationError lists all
        contradictions in the files.
        """
        source = self._source(name)
        name = "test" if source == "test" else name
        if name not in self._read:
            split, findings = self.examine_split(source)
            if findings.problems or split is None:
                raise AnnotationError(findings.problems)
            if source == "train" and self.holdout:
                split, self._read["val"] = hold_out(split, self.holdout, self.seed, self.one_caption_evaluation)
            count, most = len(split.videos), self.max_train_videos
            if source == "train" and most is not None and most < count:
                drawn = np.random.default_rng([self.seed, count, most]).permutation(count)[:most]
                split = split.take_videos(sorted(drawn.tolist()))
            self._read[source] = split
        return self._read[name]

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

    @cached_property
    def copies(self) -> Copies | None:
        """Manifest of the folder, if it contains copies of another folder (`tvr data compress`)."""
        return read_copies(self.folder)

    @property
    def store(self) -> FeatureStore:
        """Feature store `stored_in`, after checking that its parts that the run reads fit the options."""
        assert self.stored_in is not None
        # Without a method, the options name the parts.
        module = self.trainer.lightning_module if self.trainer else None
        uses_audio = self.audio is not None if module is None else getattr(module, "audio_encoder", None) is not None
        optional: dict[Part, bool] = {"patches": getattr(module, "needs_patches", False), "audio": uses_audio}
        parts: tuple[Part, ...] = ("text", "frames", *(part for part, used in optional.items() if used))
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

    def ground_truth(self, name: SplitName) -> GroundTruth:
        """Return the matching video of every text of an evaluation split, with the names used in results."""
        split = self.read_split(name)
        pairs = torch.tensor([text.video for text in split.texts], dtype=torch.int64)
        return GroundTruth(pairs, len(split.videos), self.full_title, split.name, split.protocol, self.warnings)

    # Loaders

    @override
    def setup(self, stage: str | None = None) -> None:
        self.check_present(stage)
        for name in STAGES[stage]:
            self.load_split(name)
        splits: dict[SplitName, Split] = {}
        for name in STAGES[None]:
            with suppress(AnnotationError, FileNotFoundError):  # of a split that this stage does not need
                split = self.read_split(name)
                splits[split.name] = split  # "val" may be the test split
        for one, other in combinations(splits.values(), 2):
            if ids := [video.video_id for video in shared_videos(one, other)]:
                count = f"{len(ids)} video{'s are' if len(ids) > 1 else ' is'} in both ({abbreviated(ids)})"
                entry, fix = f"{one.name} and {other.name}", "remove them from one of the two splits"
                raise AnnotationError([Problem(str(self.folder), entry, "split-overlap", count, fix)])

    @override
    def train_dataloader(self) -> DataLoader[PairBatch]:
        sharing = self._sharing()
        split, captions = self.load_split("train"), None
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
            tokenise=self.tokenise,
        )
        sampler = TrainingSampler(
            len(dataset), self.batch_size, seed=self.seed, drop_last=self.drop_last, reshuffle=self.reshuffle, **sharing
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
        split, reader = self.load_split(name), self.video_reader(training=False)
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
            assert isinstance(loader.sampler, EvaluationSampler)
            read = batches if isinstance(batches, int) else int(batches * len(loader))
            first = read * self.eval_batch_size * loader.sampler.num_replicas
            loader.sampler.shuffled = [self.seed, stream], first
        return loaders

    def video_reader(self, training: bool) -> VideoReader:
        """Return the reader of single videos and texts; training has its own frame sampling and augmentation."""
        sampling = self.train_sampling if training else self.sampling
        augmentation = self.augmentation if training else "none"
        media = MediaReader(
            self.frames, self.preparation, sampling, augmentation, self.audio, self.on_corrupt, self.tokenise
        )
        if self.stored_in is None:
            return media
        return StoreReader(self.store, self.directory, media if self.pixels else None)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(batch, FeatureBatch):  # Lightning would wait for every tensor of a record
            return batch.to(device, non_blocking=device.type == "cuda")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _sharing(self) -> dict[str, int]:
        # The strategy knows the data-parallel processes; with tensor parallelism, there are fewer of them than devices.
        shares = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) if self.trainer else None
        return {"replicas": shares["num_replicas"], "rank": shares["rank"]} if shares else {"replicas": 1, "rank": 0}
