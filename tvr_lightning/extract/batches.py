"""Reading and encoding of batches of videos, on this machine or by the actors of a Ray cluster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tvr_lightning.data.batch import Media
from tvr_lightning.data.readers import MediaReader
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError, optional
from tvr_lightning.extract.plan import ExtractOptions
from tvr_lightning.features import FeatureBatch
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.read_many import attempt, read_many
from tvr_lightning.option_types import FeaturePart


@dataclass
class PartBatch(FeatureBatch):
    """Part of K videos: values (K, ...) or a list of K tensors, mask (K, F), and times (K, F) of a list of pixels."""

    values: Tensor | list[Any]
    mask: Tensor
    times: Tensor | None = None


T = TypeVar("T")
Models = tuple[Encoder, AudioEncoder | None]
Group = tuple[Sequence[FeaturePart], list[int]]  # parts to extract, and the positions of the videos of one batch


def start_inference(models: Models, device: str) -> None:
    """Move encoders to a device, in eval mode."""
    for model in models:
        if model is not None:
            model.to(device).eval()


@dataclass
class ExtractBatch:
    """Videos of a batch, with media once they are read and with features once they are encoded."""

    failed: dict[int, str]  # reason for each unreadable video, by its position in the batch
    media: Media | None  # K readable videos; None if there are none, or after encoding
    features: dict[FeaturePart, PartBatch] = field(default_factory=dict)  # on the CPU
    problems: list[str] = field(default_factory=list)  # "path: reason" for each partly damaged audio track

    def encode(self, parts: Sequence[FeaturePart], models: Models, device: str) -> None:
        """Replace the media by the features of some parts, with encoders on `device` and in eval mode."""
        if self.media is None:
            return
        encoder, audio_encoder = models
        media = self.media.to(device)
        self.media = None
        self.problems = media.problems
        if "pixels" in parts:
            self.features["pixels"] = PartBatch(media.pixels, media.frame_mask, media.times).to("cpu")
        if "frames" in parts or "patches" in parts:
            features = encoder.encode_video(media, patches="patches" in parts)
            self.features["frames"] = PartBatch(features.frames, features.frame_mask).to("cpu")
            if features.patches is not None:
                self.features["patches"] = PartBatch(features.patches, features.frame_mask).to("cpu")
        if audio_encoder is not None and "audio" in parts:
            self.features["audio"] = PartBatch(*audio_encoder.encode_audio(media)).to("cpu")


def read_batches(
    records: list[VideoRecord], groups: Sequence[Group], read: MediaReader, models: Models, options: ExtractOptions
) -> Iterator[ExtractBatch]:
    """Yield the batches of some groups in order, read by worker processes, or read and encoded by Ray."""
    if options.engine == "ray":
        make = partial(_Encoder, records, read, models, options.device)
        return map_in_ray(make, groups, options.actors, options.address, options.device, options.progress)
    videos = [[records[i] for i in positions] for _, positions in groups]
    return read_many(videos, partial(read, generator=None), _join, workers=options.num_workers)


def _join(results: Sequence[Media | MediaError]) -> ExtractBatch:
    media = [result for result in results if isinstance(result, Media)]
    failed = {place: result.reason for place, result in enumerate(results) if isinstance(result, MediaError)}
    return ExtractBatch(failed, Media.cat(media) if media else None)


class _Encoder:
    """Reader and encoder of groups on a machine of the cluster."""

    def __init__(self, records: list[VideoRecord], read: MediaReader, models: Models, device: str) -> None:
        self.records = records
        self.read = partial(read, generator=None)
        self.models = models
        self.device = device
        start_inference(models, device)

    def __call__(self, group: Group) -> ExtractBatch:
        parts, positions = group
        batch = _join([attempt(self.read, self.records[position]) for position in positions])
        batch.encode(parts, self.models, self.device)
        return batch


class _Actor:
    """Worker of a Ray cluster, which makes one result from each item."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], items: Sequence[Any]) -> None:
        self.work = make()
        self.items = items

    @torch.no_grad()
    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        result = np.empty(1, dtype=object)
        result[0] = self.work(self.items[int(rows["item"][0])])
        return {"result": result}


def map_in_ray(
    make: Callable[[], Callable[[Any], T]],
    items: Sequence[Any],
    actors: int = 1,
    address: str | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> Iterator[T]:
    """Yield `make()(item)` of each item in order, computed by actors that read the same paths as this machine.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    ray = optional("ray", "ray", "--engine ray")
    own = not ray.is_initialized()
    try:
        if own:
            dashboard = None if address else False
            ray.init(address=address or "local", log_to_driver=False, include_dashboard=dashboard)
    except ConnectionError as error:
        raise UserError(f"--address {address}: {error}. Start a cluster there, or omit --address.") from error
    try:
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = progress
        results = ray.data.from_items(list(range(len(items))), override_num_blocks=len(items)).map_batches(
            _Actor,
            fn_constructor_args=(make, items),
            batch_size=1,
            concurrency=actors,
            num_gpus=1 if device.startswith("cuda") else 0,
        )
        for row in results.iter_rows():
            yield row["result"]
    finally:
        if own:
            ray.shutdown()
