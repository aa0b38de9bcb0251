"""`tvr extract` and `tvr caption`: features and descriptions that are computed once and stored."""

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from tvr_lightning.cli.options import Config, Device, NewFile, NewFolder, chosen_device
from tvr_lightning.config.recipe_files import refuse_options
from tvr_lightning.errors import check_present
from tvr_lightning.option_types import (
    CAPTION_MODEL,
    CAPTION_PROMPT,
    Count,
    ExtractEngine,
    FeaturePart,
    Range,
    StoreDtype,
    Workers,
)
from tvr_lightning.runs.log import loading

SplitName = Literal["train", "val", "test"]


def extract(
    config: Config,
    out: Annotated[NewFolder, "folder of the feature store"] = Path("features"),
    parts: Annotated[list[FeaturePart], "part to extract; all but pixels by default"] = [],
    batch_size: Annotated[Count, "number of items per pass through an encoder"] = 32,
    num_workers: Annotated[Workers, "number of processes that decode"] = 2,
    dtype: Annotated[StoreDtype, "data type of the stored features"] = "float32",
    device: Device = None,
    engine: Annotated[ExtractEngine, "ray uses actors of a Ray cluster to read and encode"] = "local",
    actors: Annotated[Count | None, "number of Ray actors; 1 by default"] = None,
    address: Annotated[str | None, "running Ray cluster with the same paths; a local one by default"] = None,
    overrides: Sequence[str] = (),
) -> None:
    """Encode a recipe's dataset once and store the features; rerun the command to resume."""
    if engine == "local":
        refuse_options({"actors": actors, "address": address}, "can only be used with Ray. Add --engine ray.")
    with loading("extract"):
        from tvr_lightning.config.recipe import from_recipe
        from tvr_lightning.extract.plan import ExtractOptions, source_of_data
        from tvr_lightning.extract.run import extract as extract_features
        from tvr_lightning.progress import shown

    options = ExtractOptions(
        str(out),
        what=parts,
        batch_size=batch_size,
        num_workers=num_workers,
        dtype=dtype,
        device=chosen_device(device),
        command=shlex.join(["tvr", *sys.argv[1:]]),
        engine=engine,
        actors=actors or 1,
        address=address,
    )
    with shown("extract: loading the encoders"):
        method, data = from_recipe(config, overrides)
        source = source_of_data(data)
    report = extract_features(source, method.encoder, getattr(method, "audio_encoder", None), options)
    print("\n".join([*report.lines(), f"Wrote {out}"]))


def caption(
    config: Config,
    out: Annotated[NewFile, "parquet file; train with it as data.init_args.extra_captions"] = Path("captions.parquet"),
    model: Annotated[str, "Hugging Face Hub name, or a folder of a model saved by transformers"] = CAPTION_MODEL,
    prompt: Annotated[str, "prompt that the model gets with the frames of a segment"] = CAPTION_PROMPT,
    splits: Annotated[list[SplitName], "split whose videos are described; train by default"] = [],
    segments: Annotated[Count, "number of equal segments per video, each described separately"] = 6,
    frames: Annotated[Count, "number of frames per segment that the model receives"] = 4,
    image_size: Annotated[int, Range(at_least=28), "side length of these square frames in pixels"] = 448,
    max_new_tokens: Annotated[Count, "maximum length of a description in tokens"] = 64,
    batch_size: Annotated[Count, "number of segments per batch"] = 24,
    num_workers: Annotated[Workers, "number of processes that decode"] = 2,
    device: Device = None,
    overrides: Sequence[str] = (),
) -> None:
    """Describe a dataset's videos with a vision-language model; rerun the command to resume.

    A rerun describes new videos and those whose files have changed. Only the training split is described by default,
    since tests use no descriptions.
    """
    with loading("caption"):
        from tvr_lightning.config.recipe import data_from_recipe
        from tvr_lightning.encoders.captioner import CaptionOptions, find_captioner, load_captioner
        from tvr_lightning.encoders.captioner import caption as describe
        from tvr_lightning.progress import shown

    options = CaptionOptions(out, prompt, segments, frames, image_size, max_new_tokens, batch_size, num_workers)
    data = data_from_recipe(config, overrides)
    data.extra_captions = None  # the recipe may name the file that is about to be written
    names: list[SplitName] = splits or ["train"]
    stages = {"train": "fit", "val": "validate", "test": "test"}
    check_present([*(partial(data.check_present, stages[name]) for name in names), partial(find_captioner, model)])
    videos = [video for name in names for video in data.read_split(name).videos]
    with shown(f"caption: loading {model}"):
        captioner = load_captioner(model, device)
    print("\n".join([*describe(videos, captioner, options), f"Wrote {out}"]))
