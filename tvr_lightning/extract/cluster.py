"""Extraction on a Ray cluster: actors run the encoders, and this process writes the store."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tvr_lightning.data.readers import MediaReader
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.extract.batch import ExtractBatch, encode, join
from tvr_lightning.extract.plan import ExtractOptions
from tvr_lightning.media.read_many import attempt
from tvr_lightning.store import Part

Models = tuple[Encoder, AudioEncoder | None]


class EncodingActor:
    """Reader and encoder of batches on a machine of the cluster, where the media must have the same paths."""

    def __init__(self, records: list[VideoRecord], read: MediaReader, models: Models, device: str) -> None:
        self.records, self.read, self.device = records, partial(read, generator=None), device
        encoder, audio_encoder = models
        self.models = (encoder.to(device).eval(), None if audio_encoder is None else audio_encoder.to(device).eval())

    @torch.no_grad()
    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Encode one batch. A row contains positions and parts; the result contains features."""
        parts: list[Any] = [str(part) for part in rows["parts"][0]]
        batch = join([attempt(self.read, self.records[int(place)]) for place in rows["places"][0]])
        encode(batch, parts, *self.models, self.device)
        encoded = np.empty(1, dtype=object)
        encoded[0] = batch
        return {"encoded": encoded}


def encoded_by_ray(
    records: list[VideoRecord],
    batches: Sequence[tuple[Sequence[Part], list[int]]],
    read: MediaReader,
    models: Models,
    options: ExtractOptions,
) -> Iterator[ExtractBatch]:
    """Encode batches, given by parts and positions, on `options.actors` actors and yield them in order.

    The store is the same as that of one machine.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("--engine ray needs Ray: pip install 'tvr-lightning[ray]', or use --engine local")
    import ray

    own = not ray.is_initialized()
    try:
        if own:
            dashboard = None if options.address else False
            ray.init(address=options.address or "local", log_to_driver=False, include_dashboard=dashboard)
    except ConnectionError as error:
        raise UserError(f"--address {options.address}: {error}. Start a cluster there, or omit --address.") from error
    try:
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = options.progress
        rows: list[dict[str, Any]] = [{"places": places, "parts": list(parts)} for parts, places in batches]
        encoded = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            EncodingActor,
            fn_constructor_args=(records, read, models, options.device),
            batch_size=1,
            concurrency=options.actors,
            num_gpus=1 if options.device.startswith("cuda") else 0,
        )
        for row in encoded.iter_rows():
            yield row["encoded"]
    finally:
        if own:
            ray.shutdown()
