"""`tvr extract` and `tvr caption`: features and descriptions that are computed once and stored."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvr_lightning.cli.loading import chosen_device, loading
from tvr_lightning.cli.types import AtLeast28, FileOrFolder, NewFile, NewFolder
from tvr_lightning.config.recipe_files import OptionError, refuse_options
from tvr_lightning.data.records import SplitName
from tvr_lightning.errors import check_present
from tvr_lightning.option_types import (
    CAPTION_MODEL,
    CAPTION_PROMPT,
    Count,
    ExtractEngine,
    FeaturePart,
    FrameSampling,
    StoreDtype,
    Workers,
)
from tvr_lightning.progress import shown

if TYPE_CHECKING:
    from tvr_lightning.encoders import Encoder
    from tvr_lightning.encoders.audio import AudioEncoder
    from tvr_lightning.extract.plan import ExtractSource


def extract(
    videos: list[FileOrFolder] = [],  # noqa: B006
    /,
    config: list[str] = [],  # noqa: B006
    out: NewFolder = Path("features"),
    parts: list[FeaturePart] = [],  # noqa: B006
    verify_sample: Count | None = None,
    verify: bool = False,
    architecture: str | None = None,
    weights: str | None = None,
    audio_weights: str | None = None,
    frames: Count | None = None,
    sampling: FrameSampling | None = None,
    batch_size: Count = 32,
    num_workers: Workers = 2,
    dtype: StoreDtype = "float32",
    device: str | None = None,
    seed: int | None = None,
    engine: ExtractEngine = "local",
    actors: Count | None = None,
    address: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Encode a recipe's dataset, or any videos, once and store the features; rerun the command to resume.

    Args:
        videos: video files and folders, instead of a recipe; annotations are not needed.
        config: recipe files, can be repeated, which set data and encoders; later ones override earlier ones.
        out: folder of the feature store.
        parts: parts to extract: text, frames, patches, audio, all of these (by default), or pixels; can be repeated.
        verify_sample: number of items that `--verify` recomputes; 8 by default.
        verify: compare a sample of a finished store with recomputed features, and write nothing.
        architecture: open_clip name of the encoder, without a recipe; ViT-B-32 by default.
        weights: weights of that encoder, without a recipe: a file, an open_clip tag, or none; openai by default.
        audio_weights: Whisper weights for audio features, without a recipe: a file, or none.
        frames: number of frames per video, without a recipe; 12 by default.
        sampling: rule for selecting the frames, without a recipe; one-fps-uniform by default.
        batch_size: number of items per pass through an encoder.
        num_workers: number of processes that decode.
        dtype: data type of the stored features.
        device: device for the encoders; a GPU by default if available.
        seed: seed for random weights, without a recipe; 0 by default.
        engine: local, or ray for actors of a Ray cluster that read and encode while this process writes.
        actors: number of Ray actors; 1 by default.
        address: address of a running Ray cluster that sees the videos under the same paths; by default a local one is
            started.
        overrides: options that override those of recipes.
    """
    if bool(videos) == bool(config):
        raise OptionError("Give either a recipe (--config FILE) or video files and folders to extract from.")
    of_files: dict[str, Any] = {
        "architecture": architecture, "weights": weights, "audio_weights": audio_weights, "frames": frames,
        "sampling": sampling, "seed": seed,
    }  # fmt: skip
    if config:
        refuse_options(of_files, "cannot be used with --config. Set the recipe's own options instead.")
    elif overrides:
        raise OptionError(f"{overrides[0]} overrides an option of a recipe. Add --config FILE.")
    if not verify:
        refuse_options({"verify_sample": verify_sample}, "can only be used for a verification. Add --verify.")
    if engine == "local":
        refuse_options({"actors": actors, "address": address}, "can only be used with Ray. Add --engine ray.")
    elif verify:
        raise OptionError("--engine ray cannot be used with --verify, which computes in this process. Leave it out.")
    with loading("extract"):
        from tvr_lightning.extract.plan import ExtractOptions
        from tvr_lightning.extract.run import extract as extract_features
        from tvr_lightning.extract.verify import verify as compare_store

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
            source, encoder, audio_encoder = _recipe_source(config, overrides)
        else:
            given = {name: value for name, value in of_files.items() if value is not None}
            source, encoder, audio_encoder = _file_source(videos, **given)
    if verify:
        sample = verify_sample or 8
        with shown(f"extract: computing {sample} items again"):
            deviations = compare_store(source, encoder, audio_encoder, options, sample=sample)
        for name, deviation in deviations.items():
            print(f"{name}: largest deviation {deviation:.1e}")
        return 0
    print("\n".join([*extract_features(source, encoder, audio_encoder, options).lines(), f"Wrote {out}"]))
    return 0


def _recipe_source(config: list[str], overrides: Sequence[str]) -> tuple[ExtractSource, Encoder, AudioEncoder | None]:
    from tvr_lightning.config.recipe import from_recipe
    from tvr_lightning.extract.source import source_of_data

    method, data = from_recipe(config, overrides)
    return source_of_data(data), method.encoder, getattr(method, "audio_encoder", None)


def _file_source(
    videos: Sequence[Path],
    architecture: str = "ViT-B-32",
    weights: str = "openai",
    audio_weights: str | None = None,
    frames: int = 12,
    sampling: FrameSampling = "one-fps-uniform",
    seed: int = 0,
) -> tuple[ExtractSource, Encoder, AudioEncoder | None]:
    import torch

    from tvr_lightning.data.audio_alignment import AudioOptions
    from tvr_lightning.encoders import ClipEncoder, WhisperEncoder
    from tvr_lightning.extract.source import source_of_files

    torch.manual_seed(seed)  # random weights must be the same when an interrupted extraction resumes
    encoder = ClipEncoder(architecture, weights)
    audio_encoder = None if audio_weights is None else WhisperEncoder(weights=audio_weights)
    audio = None if audio_encoder is None else AudioOptions("whisper")
    return source_of_files(videos, encoder.preparation, frames, sampling, audio), encoder, audio_encoder


def caption(
    config: list[str],
    out: NewFile = Path("captions.parquet"),
    model: str = CAPTION_MODEL,
    prompt: str = CAPTION_PROMPT,
    splits: list[SplitName] = [],  # noqa: B006
    segments: Count = 6,
    frames: Count = 4,
    image_size: AtLeast28 = 448,
    max_new_tokens: Count = 64,
    batch_size: Count = 24,
    num_workers: Workers = 2,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Describe the segments of a dataset's videos with a vision-language model; rerun the command to resume.

    Args:
        config: recipe files or data overlays, can be repeated; later ones override earlier ones.
        out: parquet file for the descriptions; set data.init_args.extra_captions to it to train with them.
        model: Hugging Face Hub name, or a folder of a model saved by transformers.
        prompt: prompt that the model gets with the frames of a segment.
        splits: splits whose videos are described; only the training split by default, since tests use no
            descriptions; can be repeated.
        segments: number of equal segments per video, each described separately.
        frames: number of frames per segment that the model receives.
        image_size: side length of these square frames in pixels.
        max_new_tokens: maximum length of a description in tokens.
        batch_size: number of segments per batch.
        num_workers: number of processes that decode.
        device: device for the model; a GPU by default if available.
        overrides: options that override those of recipes.
    """
    with loading("caption"):
        from tvr_lightning.config.recipe import data_from_recipe
        from tvr_lightning.encoders.captioner import CaptionOptions, find_captioner, load_captioner
        from tvr_lightning.encoders.captioner import caption as describe

    options = CaptionOptions(out, prompt, segments, frames, image_size, max_new_tokens, batch_size, num_workers)
    data = data_from_recipe(config, overrides)
    data.extra_captions = None  # the recipe may name the file that is about to be written
    chosen: list[SplitName] = splits or ["train"]
    stages = ["fit" if name == "train" else "validate" if name == "val" else "test" for name in chosen]
    check_present([*(partial(data.check_present, stage) for stage in stages), partial(find_captioner, model)])
    videos = [video for name in chosen for video in data.read_split(name).videos]
    with shown(f"caption: loading {model}"):
        captioner = load_captioner(model, device)
    print("\n".join([*describe(videos, captioner, options).lines(), f"Wrote {out}"]))
    return 0
