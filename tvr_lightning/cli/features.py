"""`tvr extract` and `tvr caption`: features and descriptions that are computed once and stored."""

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from tvr_lightning.cli.options import Config, Device, FileOrFolder, NewFile, NewFolder, chosen_device
from tvr_lightning.config.recipe_files import refuse_options
from tvr_lightning.errors import UserError, check_present
from tvr_lightning.option_types import (
    CAPTION_MODEL,
    CAPTION_PROMPT,
    Count,
    ExtractEngine,
    FeaturePart,
    FrameSampling,
    Range,
    StoreDtype,
    Workers,
)
from tvr_lightning.runs.log import loading

SplitName = Literal["train", "val", "test"]


def extract(
    videos: Annotated[list[FileOrFolder], "video files and folders, instead of a recipe"] = [],
    /,
    config: Config = [],
    out: Annotated[NewFolder, "folder of the feature store"] = Path("features"),
    parts: Annotated[list[FeaturePart], "part to extract; all but pixels by default"] = [],
    verify_sample: Annotated[Count | None, "number of items that --verify recomputes; 8 by default"] = None,
    verify: Annotated[bool, "compare a sample of a finished store with recomputed features, write nothing"] = False,
    architecture: Annotated[str | None, "open_clip name of the encoder; ViT-B-32 by default"] = None,
    weights: Annotated[str | None, "its weights: a file, an open_clip tag, or none; openai by default"] = None,
    audio_weights: Annotated[str | None, "Whisper weights for audio features: a file, or none"] = None,
    frames: Annotated[Count | None, "number of frames per video; 12 by default"] = None,
    sampling: Annotated[FrameSampling | None, "rule for selecting the frames; one-fps-uniform by default"] = None,
    batch_size: Annotated[Count, "number of items per pass through an encoder"] = 32,
    num_workers: Annotated[Workers, "number of processes that decode"] = 2,
    dtype: Annotated[StoreDtype, "data type of the stored features"] = "float32",
    device: Device = None,
    seed: Annotated[int | None, "seed for random weights; 0 by default"] = None,
    engine: Annotated[ExtractEngine, "ray uses actors of a Ray cluster to read and encode"] = "local",
    actors: Annotated[Count | None, "number of Ray actors; 1 by default"] = None,
    address: Annotated[str | None, "running Ray cluster with the same paths; a local one by default"] = None,
    overrides: Sequence[str] = (),
) -> None:
    """Encode a recipe's dataset, or any videos, once and store the features; rerun the command to resume.

    A recipe sets data and encoders. The options architecture, weights, audio_weights, frames, sampling, and seed are
    for videos without a recipe, which need no annotations.
    """
    if bool(videos) == bool(config):
        raise UserError("Give either a recipe (--config FILE) or video files and folders to extract from.")
    of_files = {
        "architecture": architecture, "weights": weights, "audio_weights": audio_weights, "frames": frames,
        "sampling": sampling, "seed": seed,
    }  # fmt: skip
    if config:
        refuse_options(of_files, "cannot be used with --config. Set the recipe's own options instead.")
    elif overrides:
        raise UserError(f"{overrides[0]} overrides an option of a recipe. Add --config FILE.")
    if not verify:
        refuse_options({"verify_sample": verify_sample}, "can only be used for a verification. Add --verify.")
    if engine == "local":
        refuse_options({"actors": actors, "address": address}, "can only be used with Ray. Add --engine ray.")
    elif verify:
        raise UserError("--engine ray cannot be used with --verify, which computes in this process. Leave it out.")
    with loading("extract"):
        import torch

        from tvr_lightning.config.recipe import from_recipe
        from tvr_lightning.data.audio_alignment import AudioOptions
        from tvr_lightning.encoders import ClipEncoder, WhisperEncoder
        from tvr_lightning.extract.plan import ExtractOptions, source_of_data, source_of_files
        from tvr_lightning.extract.run import extract as extract_features
        from tvr_lightning.extract.verify import verify as compare_store
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
        if config:
            method, data = from_recipe(config, overrides)
            source, encoder = source_of_data(data), method.encoder
            audio_encoder = getattr(method, "audio_encoder", None)
        else:
            torch.manual_seed(seed or 0)  # random weights must be the same when an interrupted extraction resumes
            encoder = ClipEncoder(architecture or "ViT-B-32", weights or "openai")
            audio_encoder = WhisperEncoder(weights=audio_weights) if audio_weights else None
            audio = AudioOptions("whisper") if audio_weights else None
            rule = sampling or "one-fps-uniform"
            source = source_of_files(videos, encoder.preparation, frames or 12, rule, audio)
    if verify:
        sample = verify_sample or 8
        with shown(f"extract: computing {sample} items again"):
            deviations = compare_store(source, encoder, audio_encoder, options, sample=sample)
        print("\n".join(f"{name}: largest deviation {deviation:.1e}" for name, deviation in deviations.items()))
    else:
        print("\n".join([*extract_features(source, encoder, audio_encoder, options).lines(), f"Wrote {out}"]))


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
