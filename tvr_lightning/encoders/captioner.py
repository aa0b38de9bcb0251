"""Descriptions of video segments by a vision-language model, for DPDV's Recover-Path.

The paper's captioner is VILA. The default here is Qwen2.5-VL, another model from its Table S7, because it is part of
transformers. Any image-text-to-text model on the Hugging Face Hub works if its processor has a chat template.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from tvr_lightning.data.records import VideoRecord, tidy
from tvr_lightning.data.recover_captions import SCHEMA, Description
from tvr_lightning.encoders.base import fingerprint
from tvr_lightning.encoders.hub import WEIGHTS, how_to_download, is_repository, repository_folder
from tvr_lightning.errors import UserError, abbreviated, optional
from tvr_lightning.files import Journal, explain_write_errors, replace_whole
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.read_many import read_many
from tvr_lightning.media.video import read_parts
from tvr_lightning.option_types import CAPTION_MODEL, CAPTION_PROMPT, Count, Options, Range, Workers
from tvr_lightning.progress import progress_bar
from tvr_lightning.store.feature_store import file_mark, is_same_file

SETTINGS = b"tvr_captions"
Rows = dict[str, list[dict[str, Any]]]  # of a captions file, one per segment, by video ID


@dataclass
class CaptionOptions(Options):
    """Settings for describing videos, as described by `tvr caption --help`."""

    out: Path
    prompt: str = CAPTION_PROMPT
    segments: Count = 6
    frames: Count = 4
    image_size: Annotated[int, Range(at_least=28)] = 448
    max_new_tokens: Count = 64
    batch_size: Count = 24
    num_workers: Workers = 2
    progress: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt.strip():
            raise UserError("prompt is empty; it must tell the model what to describe")
        if self.out.suffix != ".parquet":
            raise UserError(f"out is {self.out}; it must be a .parquet file")


class Captioner:
    """Vision-language model of transformers in eval mode, with its processor, for segments (B, F, 3, S, S).

    `weights_hash` is the SHA-256 of the weights, the processor's rules and the generation settings, shortened.
    """

    def __init__(self, model: Any, processor: Any, name: str) -> None:
        if not getattr(processor, "chat_template", None):
            raise UserError(f"{name}: its processor has no chat template. Choose an instruction-tuned model.")
        self.model, self.processor, self.name = model.eval(), processor, name
        tokenizer = processor.tokenizer
        tokenizer.padding_side = "left"  # generation continues after the last token of the prompt
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        generation = model.generation_config.to_diff_dict()
        generation.pop("transformers_version", None)
        rules = {
            "chat_template": processor.chat_template,
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "images": sorted(processor.image_processor.to_dict().items()),
            "generation": sorted(generation.items()),
        }
        self.weights_hash = fingerprint(rules, model.state_dict())[:16]

    @torch.no_grad()
    def describe(self, segments: Tensor, prompt: str, max_new_tokens: int) -> list[str]:
        """Describe B segments, frames (B, F, 3, S, S) uint8, in one line each, possibly empty, with greedy decoding."""
        content: list[dict[str, str]] = [{"type": "image"} for _ in range(segments.shape[1])]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = [list(frames) for frames in segments]
        inputs = self.processor(text=[text] * len(segments), images=images, padding=True, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        greedy = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
        pad = self.processor.tokenizer.pad_token_id
        tokens = self.model.generate(**inputs, **greedy, max_new_tokens=max_new_tokens, pad_token_id=pad)
        generated = tokens[:, inputs["input_ids"].shape[1] :]
        return [tidy(line) for line in self.processor.batch_decode(generated, skip_special_tokens=True)]


def load_captioner(model: str = CAPTION_MODEL, device: str | None = None) -> Captioner:
    """Load a captioner from a folder or from the Hugging Face cache; nothing is downloaded.

    The device is by default a GPU if there is one. Weights are bfloat16 on a GPU and float32 on a CPU.
    """
    library = optional("transformers", "audio", f"the captioner {model}")
    folder = find_captioner(model)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        processor = library.AutoProcessor.from_pretrained(folder, local_files_only=True)
        loaded: Any = library.AutoModelForImageTextToText.from_pretrained(
            folder, local_files_only=True, weights_only=True, dtype=dtype
        )
    except Exception as error:  # transformers checks few of the files
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"{folder} cannot be loaded as an image-text-to-text model ({reason}).") from error
    return Captioner(loaded.to(device), processor, model)


def find_captioner(model: str) -> Path:
    """Return the folder of a captioner (Hub name or folder) with its config and weights."""
    fix = f"{how_to_download(model)}. " if is_repository(model) else ""
    fix += (
        "Descriptions can also be provided without a model: a parquet file with the columns video_id, segment (0, 1, "
        "...), caption and, if known, start and end (seconds), model (the author), prompt, and weights_hash."
    )
    return repository_folder(model, WEIGHTS, f"the captioner {model} has no weights", fix)


def _read_segments(video: VideoRecord, options: CaptionOptions) -> tuple[list[Description], Tensor]:
    """Return the segments of a video without captions, and their frames (N_s, F, 3, S, S) uint8."""

    def divide(duration: float) -> list[tuple[float, float]]:
        """Return the (start, end) of equal parts of the video, in seconds."""
        start, end = video.span or (0.0, duration)
        length = min(end, duration) - start
        return list(itertools.pairwise(start + length * i / options.segments for i in range(options.segments + 1)))

    mark = json.dumps(file_mark(video.path))  # before reading, so that a change during it is noticed
    clips = read_parts(video.path, divide, options.frames, Preparation(options.image_size))
    spans = divide(clips[0].duration)
    segments = [Description(video.video_id, number, *span, "", file=mark) for number, span in enumerate(spans)]
    return segments, torch.stack([clip.pixels for clip in clips])


@contextmanager
def open_captions(out: Path, settings: dict[str, Any]) -> Iterator[tuple[Journal, Rows]]:
    """Lock a captions file inside the context, and yield the journal of an unfinished run and the rows of each video.

    The journal `<out>.unfinished` has the settings as its header and the rows of one group of videos per entry, which
    replace those of the file.

    Raises:
        UserError: The file or the journal contains descriptions with other settings, the file does not contain
            descriptions, another process writes it, or the disk is full or read-only.
    """
    _read_captions(out, settings)  # refuses another file before it creates a journal
    with Journal.open(out.with_name(out.name + ".unfinished"), settings, f"the captions {out}") as journal:
        _check_settings(journal.file, journal.header, settings)
        rows: Rows = {}
        for group in [_read_captions(out, settings), *journal.entries]:
            rows |= by_video(group)
        yield journal, rows


def by_video(rows: Iterable[dict[str, Any]]) -> Rows:
    """Return consecutive rows, one per segment, by video ID."""
    return {name: list(segments) for name, segments in itertools.groupby(rows, itemgetter("video_id"))}


def finish_captions(out: Path, journal: Journal, rows: Rows, order: Sequence[str]) -> None:
    """Write the file with the videos in this order, after others that it contains, and remove the journal."""
    positions = {name: position for position, name in enumerate(order)}
    made = {name: journal.header[name] for name in ("model", "prompt", "weights_hash")}
    names = sorted(rows, key=lambda name: positions.get(name, -1))
    table = pa.Table.from_pylist([row | made for name in names for row in rows[name]], schema=SCHEMA)
    table = table.replace_schema_metadata({SETTINGS: json.dumps(journal.header).encode()})
    with explain_write_errors(out, "Earlier descriptions are kept."), replace_whole(out) as file:
        pq.write_table(table, file)
    journal.file.unlink(missing_ok=True)


def _read_captions(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is damaged ({reason}). Delete it, or choose another file with --out.") from error
    found = (table.schema.metadata or {}).get(SETTINGS)
    if found is None:
        raise UserError(
            f"{path} was not written by a captioner, so it is not overwritten. Choose another file with --out."
        )
    _check_settings(path, json.loads(found), settings)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _check_settings(path: Path, found: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, wanted in settings.items():
        if found.get(name) != wanted:
            raise UserError(
                f"{path} contains descriptions made with {name} {found.get(name)!r}, not {wanted!r}. Choose another "
                "file with --out, or resume with the same options."
            )


def _has_changed(video: VideoRecord, rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether the video's file exists and is not the one that these rows describe."""
    mark = json.loads(rows[0].get("file") or "null")
    return video.path.is_file() and not is_same_file(video.path, mark and tuple(mark))


def caption(videos: Sequence[VideoRecord], captioner: Captioner, options: CaptionOptions) -> list[str]:
    """Describe the segments of videos, write the descriptions to one parquet file, and return a report in sentences.

    If the process is killed, a rerun gives the same file as an uninterrupted run: groups are formed from the whole
    list of videos, and each group is added to a journal as soon as it is described. Videos already in the file are
    skipped unless their files have changed. For duplicate IDs, the first video is used.
    """
    settings = {
        "model": captioner.name,
        "prompt": options.prompt,
        "weights_hash": captioner.weights_hash,
        "segments": options.segments,
        "reading": f"{options.frames} frames of {options.image_size} pixels, {options.max_new_tokens} tokens",
    }
    distinct: dict[str, VideoRecord] = {}
    for video in videos:
        distinct.setdefault(video.video_id, video)
    described, empty, skipped = 0, 0, []
    with open_captions(options.out, settings) as (journal, rows):
        listed = distinct.keys() & rows.keys()
        changed = sorted(name for name in listed if _has_changed(distinct[name], rows[name]))
        for name in changed:
            del rows[name]
        there = rows.keys() & distinct.keys()
        # A group is described as a whole, except for videos that are already in the file.
        size = max(1, options.batch_size // options.segments)
        groups = [list(distinct.values())[start : start + size] for start in range(0, len(distinct), size)]
        waiting = [[video for video in group if video.video_id not in there] for group in groups]
        read = partial(_read_segments, options=options)
        with progress_bar(options.progress) as bar:
            task = bar.add_task("describing videos", total=len(distinct), completed=len(there))
            for found in read_many(list(filter(None, waiting)), read, list, workers=options.num_workers):
                skipped += [f"skipped: {each}" for each in found if isinstance(each, MediaError)]
                readable = [each for each in found if not isinstance(each, MediaError)]
                segments = [segment for found_segments, _ in readable for segment in found_segments]
                texts: list[str] = []
                for part in torch.cat([pixels for _, pixels in readable]).split(options.batch_size) if readable else ():
                    texts += captioner.describe(part, options.prompt, options.max_new_tokens)
                made = [asdict(replace(each, caption=text)) for each, text in zip(segments, texts, strict=True)]
                journal.append(made)
                rows |= by_video(made)
                described += len(readable)
                empty += texts.count("")
                bar.advance(task, len(found))
        finish_captions(options.out, journal, rows, list(distinct))
    report = [f"{described} videos described, {len(there)} already present"]
    if changed:
        report.append(f"earlier descriptions of {len(changed)} changed files were dropped: {abbreviated(changed)}")
    if empty:
        report.append(f"{empty} descriptions are empty and are ignored by methods")
    return report + skipped
