"""Reading of videos and texts: the requirements of a model, and the splits that can be read."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from tvr_lightning.data.annotated import STAGES, AnnotatedDataset
from tvr_lightning.data.audio_alignment import AudioOptions
from tvr_lightning.data.batch import Tokens
from tvr_lightning.data.copies import Copies, read_copies
from tvr_lightning.data.readers import MediaReader, StoreReader, VideoReader, frame_fingerprint, text_fingerprint
from tvr_lightning.data.records import Split, SplitName
from tvr_lightning.data.recover_captions import find_captions
from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.media.augment import Augmentation
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.option_types import FrameSampling
from tvr_lightning.store import FeatureStore, Part, StoreError


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


class ReadableDataset(AnnotatedDataset):
    """Dataset whose videos and texts can be read: from video files, copies of them, or a feature store."""

    frames: int
    words: int
    preparation: Preparation
    sampling: FrameSampling
    train_sampling: FrameSampling
    augmentation: Augmentation
    on_corrupt: Literal["error", "skip"]
    features: str | None
    pixels: str | None
    audio: AudioOptions | None
    extra_captions: str | None
    needs: Needs
    _loaded: dict[SplitName, Split]
    _stores: dict[tuple[Part, ...], FeatureStore]

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
                "deterministic sampling such as 'segment-centres' for evaluation"
            )

    @property
    def stored_in(self) -> str | None:
        """Feature store that is read instead of the videos, of features or of frames; None if there is none."""
        return self.features or self.pixels

    def check_present(self, stage: str | None = None, annotations_only: bool = False) -> None:
        """Raise MissingAssetError unless annotation files, videos and captions of a stage (None: all) exist."""
        absent = self.missing_annotations(stage)
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
        optional: dict[Part, bool] = {"patches": self.needs.patches, "audio": uses_audio}
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

    def video_reader(self, training: bool) -> VideoReader:
        """Return the reader of single videos and texts; training has its own frame sampling and augmentation."""
        sampling = self.train_sampling if training else self.sampling
        augmentation = self.augmentation if training else "none"
        tokenize = self.needs.tokenize
        media = MediaReader(
            self.frames, self.preparation, sampling, augmentation, self.audio, self.on_corrupt, tokenize
        )
        return (
            media if self.stored_in is None else StoreReader(self.store, self.directory, media if self.pixels else None)
        )

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
