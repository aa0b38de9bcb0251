"""Rerankers: models that score captions with a video file, as the second stage of retrieval.

Each pair of an evaluation's candidates is scored once, and scores survive a killed process.
"""

import hashlib
import importlib
import inspect
import json
import secrets
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.hub import how_to_download, repository_folder
from tvr_lightning.errors import UserError, optional
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.files import Journal, read_journal
from tvr_lightning.media.sampling import Span
from tvr_lightning.media.video import read_clip
from tvr_lightning.option_types import Count, FrameSampling, Role, check
from tvr_lightning.progress import clock, progress_bar

LARGEST = 1e5  # maximum magnitude of a score, so that all candidates rank before the other items
TICKS = 1000.0  # per second, the unit of frame times that processors get


def _module_code(item: Any) -> str:
    """Return a digest of the file that defines an item, so that scores of edited code are not used again."""
    file = getattr(inspect.getmodule(item), "__file__", None)
    if file is None or "<locals>" in getattr(item, "__qualname__", ""):  # its values are not in the file
        return secrets.token_hex()  # never found again
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


class Reranker(ABC):
    """Model that scores captions with a video file and gets no other information about either.

    Attributes:
        name: name in result tables.
        takes_spans: whether it can score a part of a file.
        noise: maximum change of a score that counts as rounding, in standard deviations of the scores.
    """

    name: str
    takes_spans = True
    noise = 1e-3

    @abstractmethod
    def score(self, captions: Sequence[str], video: Path, span: Span | None = None) -> Sequence[float]:
        """Return finite scores of N captions with a video file, or with a span of it in seconds; higher is better."""

    def load(self) -> None:  # noqa: B027  functions have no weights
        """Load the weights, before the first score."""

    def settings(self) -> dict[str, Any]:
        """Return all settings that scores depend on, which identify stored scores."""
        return {"name": self.name}

    def checked(self, captions: Sequence[str], video: Path, span: Span | None = None) -> list[float]:
        """Return the scores of the file under a random name, or raise UserError if they are invalid."""
        with neutral_link(video) as link:
            scores = [float(score) for score in self.score(captions, link, span)]
        if len(scores) != len(captions) or not all(abs(score) <= LARGEST for score in scores):
            raise UserError(
                f"The reranker {self.name} returned {scores[:3]} for {len(captions)} captions; expected one "
                f"number from {-LARGEST:g} to {LARGEST:g} each."
            )
        return scores

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the reranker itself, because weights can be large and never change."""
        return self


class FunctionReranker(Reranker):
    """Function of a caption and a video file that returns a score.

    Args:
        function: the function, or its import path in your own module, such as `my_module.my_function`.
    """

    takes_spans = False

    def __init__(self, function: str | Callable[[str, Path], float]) -> None:
        if isinstance(function, str):
            path, (module, _, name) = function, function.rpartition(".")
            try:
                function = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise UserError(f"The reranker {path} cannot be imported ({error}). Check its import path.") from error
            # Files can name functions of this package without --trust, also imported ones that delete files.
            if callable(function) and (module.startswith("tvr_lightning.") or function.__module__ != module):
                raise UserError(f"The reranker {path} is not defined there. Name a function of your own module.")
        if not callable(function):
            raise UserError(f"The reranker {function!r} is not a function of a caption and a video file.")
        self.function = function
        self.name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"

    @override
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "module": _module_code(self.function)}

    @override
    def score(self, captions: Sequence[str], video: Path, span: Span | None = None) -> Sequence[float]:
        return [self.function(caption, video) for caption in captions]


class CrossEncoderReranker(Reranker):
    """Model of sentence-transformers that scores pairs of a caption and a video, such as Qwen3-VL-Reranker.

    Scores are the model's logits, or the difference of two logits if the model answers yes or no. Frames keep their
    aspect ratio and real times, and the model's processor resizes them.

    Args:
        weights: repository on the Hugging Face Hub, read from its cache, or folder.
        instruction: instruction for all pairs; by default that of the model's configuration.
        frames: maximum number of frames of a video.
        sampling: rule for selecting them.
        batch_size: number of captions per pass, each with its own copy of the video.
        dtype: data type of the weights; logits are computed in float32.
        device: device of the model; a GPU by default if available.
        trust_remote_code: whether to run the code of the repository, which some models need.
    """

    def __init__(
        self,
        weights: Annotated[str, Role.FILE],
        instruction: str | None = None,
        frames: Count = 64,
        sampling: FrameSampling = "one-fps-uniform",
        batch_size: Annotated[Count, Role.MACHINE] = 1,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: Annotated[str | None, Role.MACHINE] = None,
        trust_remote_code: bool = False,
    ) -> None:
        optional("sentence_transformers", "vlm", f"the reranker {weights}")
        fix = f"{how_to_download(weights)}, or name a folder."
        self.folder = repository_folder(
            weights, ["modules.json", "config.json"], f"the reranker {weights} is missing", fix
        )
        modules = self.folder / "modules.json"
        listed = json.loads(modules.read_text(encoding="utf-8")) if modules.is_file() else []
        kinds = [str(module["type"]) for module in listed]
        if not any("cross_encoder" in kind for kind in kinds):
            raise UserError(f"{weights} is not saved as a CrossEncoder of sentence-transformers. Choose a reranker.")
        own = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
        if own and not trust_remote_code:
            raise UserError(f"{weights} runs its own code ({own[0]}). If you trust it, set trust_remote_code: true.")
        if not any("video" in path.read_text(encoding="utf-8") for path in self.folder.rglob("*processor_config.json")):
            raise UserError(f"{weights} does not accept video. Choose a reranker for text and video.")
        self.name, self.instruction, self.frames, self.sampling = weights, instruction, frames, sampling
        self.batch_size, self.dtype, self.device, self.trust_remote_code = batch_size, dtype, device, trust_remote_code
        self.noise = 0.1 if dtype == "bfloat16" else 1e-3
        self._model: Any = None
        check(self)

    @override
    def settings(self) -> dict[str, Any]:
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]  # also code and templates
        return {
            "name": self.name,
            "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
            "options": [self.instruction, self.frames, self.sampling, self.dtype],
        }

    @override
    def load(self) -> None:
        from sentence_transformers import CrossEncoder

        if self._model is not None:
            return
        model = self._model = CrossEncoder(
            str(self.folder), device=self.device, local_files_only=True, trust_remote_code=self.trust_remote_code,
            model_kwargs={"dtype": self.dtype}, activation_fn=torch.nn.Identity(),
        )  # fmt: skip
        heads = [name for name, part in model.named_modules() if name.endswith("lm_head")]
        model.set_keep_in_fp32_modules(heads)

    @override
    def score(self, captions: Sequence[str], video: Path, span: Span | None = None) -> Sequence[float]:
        self.load()
        clip = read_clip(video, self.frames, np.asarray, self.sampling, span)
        frames, times = clip.pixels[clip.frame_mask], clip.timestamps[clip.frame_mask]
        if len(frames) % 2:  # two frames are one patch over time
            frames, times = torch.cat([frames, frames[-1:]]), torch.cat([times, times[-1:]])
        described = {
            "fps": TICKS,
            "frames_indices": (times * TICKS).round().int().tolist(),
            "total_num_frames": int(clip.duration * TICKS),
            "duration": clip.duration,
        }
        # Qwen3-VL's authors limit the pixels of a frame, which transformers will also do by default.
        capped = hasattr(getattr(self._model.processor, "video_processor", None), "cap_pixels_per_frame")
        published = {"cap_pixels_per_frame": True} if capped else {}
        scores: list[float] = []
        for start in range(0, len(captions), self.batch_size):
            pairs = [(caption, {"video": frames}) for caption in captions[start : start + self.batch_size]]
            options = {"video": {"do_sample_frames": False, "video_metadata": [described] * len(pairs), **published}}
            scores += self._model.predict(
                pairs, prompt=self.instruction, batch_size=self.batch_size, processing_kwargs=options
            ).tolist()
        return scores


def reranker_of(name: str, device: str | None = None) -> Reranker:
    """Return a reranker by name: the folder or repository of a CrossEncoder, or the import path of a function."""
    if "/" in name or Path(name).is_dir():
        return CrossEncoderReranker(name, device=device)
    return FunctionReranker(name)


@contextmanager
def neutral_link(video: Path) -> Iterator[Path]:
    """Yield a link to a file under a random name in a private folder, so that its name reveals nothing."""
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / f"{secrets.token_hex(8)}{video.suffix}"
        link.symlink_to(video.resolve())
        yield link


@dataclass
class RerankedPairs:
    """Scores (P,) of pairs by their ascending keys (P,), and the mean time of a pair in seconds."""

    keys: Tensor
    scores: Tensor
    seconds: float

    def of(self, keys: Tensor) -> Tensor:
        """Return the scores of some of the pairs, in the shape of their keys."""
        return self.scores[torch.searchsorted(self.keys, keys)]


def rerank(reranker: Reranker, source: PairScores, keys: Tensor, folder: Path) -> RerankedPairs:
    """Score pairs of captions and video files, one video after the other, and store the scores of each video.

    Texts and videos of the source are in random orders, so that positions reveal nothing.

    Raises:
        UserError: There are no captions or files, or the reranker does not accept them.
    """
    captions, files, shard = source.captions, source.files, source.shard
    if not files:
        raise UserError("Reranking needs captions and video files, which only this project's data modules provide.")
    pairs: dict[int, list[int]] = {}
    for key in keys.tolist():
        pairs.setdefault(key // source.queries, []).append(key % source.queries)
    absent = [str(files[video].path) for video in pairs if not files[video].path.is_file()]
    if absent:
        raise UserError(f"Reranking needs {len(absent)} video files that are missing, such as {absent[0]}. Add them.")
    if not reranker.takes_spans and any(files[video].span for video in pairs):
        raise UserError(
            f"The reranker {reranker.name} scores whole files, but videos of this dataset are parts of files."
        )
    settings = reranker.settings()
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    stored: dict[str, dict[str, float]] = {}
    times = {}

    def add(entry: Any) -> None:
        stored.setdefault(entry["video"], {}).update(entry["scores"])
        times[entry["video"]] = entry["seconds"] / len(entry["scores"])

    mine = [video for video in pairs if video % shard.world == shard.rank]
    name = f"{digest}-{shard.rank}.jsonl"
    with (
        Journal.open(folder / name, settings, f"the reranked scores {folder / name}") as journal,
        progress_bar(shard.rank == 0) as bar,
    ):
        for other in sorted(folder.glob(f"{digest}-*.jsonl")):  # also of runs with more processes
            for entry in read_journal(other)[0][1:]:
                add(entry)
        known = [_identity(files[video]) for video in mine]
        missing = []
        for video, key in zip(mine, known, strict=True):
            wanted = dict.fromkeys(captions[text] for text in pairs[video])
            missing.append((files[video], key, [caption for caption in wanted if caption not in stored.get(key, {})]))
        missing = [job for job in missing if job[2]]
        left = sum(len(asked) for _, _, asked in missing)
        if left:
            reranker.load()
            record, key, asked = missing[0]
            missing[:1] = [(record, key, part) for part in (asked[:1], asked[1:]) if part]  # to time the first pair
        task = bar.add_task(f"reranking by {reranker.name}", total=left, visible=left > 0)
        for number, (record, key, asked) in enumerate(missing):
            start = time.monotonic()
            scores = reranker.checked(asked, record.path, record.span)
            seconds = time.monotonic() - start
            if number == 0:
                rank_zero_info(
                    f"Reranking {left} pairs takes at most about {clock(left * seconds)}, at {seconds:.3g} s for the "
                    f"first; scores are stored in {folder}."
                )
            journal.append({"video": key, "scores": dict(zip(asked, scores, strict=True)), "seconds": seconds})
            add(journal.entries[-1])
            bar.advance(task, len(asked))
    found = torch.zeros(len(keys), dtype=torch.float64)
    place = {key: number for number, key in enumerate(keys.tolist())}
    for video, key in zip(mine, known, strict=True):
        for text in pairs[video]:
            found[place[video * source.queries + text]] = stored[key][captions[text]]
    mean = torch.tensor([sum(times[key] for key in known), len(known)], dtype=torch.float64)
    found, mean = (shard.sum(each.to(source.device)).cpu() for each in (found, mean))
    return RerankedPairs(keys, found, float(mean[0] / mean[1]))


def _identity(video: VideoRecord) -> str:
    """Return the path, size, and time of change of a file with the span, which identify stored scores."""
    status = video.path.stat()
    return json.dumps([str(video.path.resolve()), status.st_size, status.st_mtime_ns, video.span])
