"""Encoder of texts and videos with any MTEB model and MTEB's own preprocessing."""

import importlib
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import huggingface_hub
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.hub import MissingWeightsError, how_to_download
from tvr_lightning.errors import UserError, optional
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.clip_file import ClipFile, DecodedFrames
from tvr_lightning.media.preparation import ResizeMode
from tvr_lightning.option_types import Count, Role


class MTEBEncoder(Encoder):
    """Model that MTEB evaluates on text and video, with MTEB's selection of frames, prompts, and pooling.

    Captions are encoded as queries and videos as documents, each as one vector: a caption has one word (N, 1, D), and a
    video one frame (M, 1, D). The weights cannot be trained, since MTEB's models return vectors without gradients.

    Args:
        model: name in MTEB, such as microsoft/xclip-base-patch32, or a folder of weights if `wrapper` is set.
        revision: revision of the weights; that of MTEB by default.
        wrapper: import path of the class that loads a folder, such as
            mteb.models.model_implementations.xclip_models.XCLIPModel.
        options: further arguments of the class, such as the number of frames.
        task: MTEB task whose prompt is added to the queries, such as MSRVTTT2V; none by default.
        batch_size: number of captions or videos per pass.
        trust_remote_code: whether to run the code of the repository, which some models need.
    """

    gives_patches = False
    gives_frames = False
    resize_mode: ResizeMode = "undecoded"
    image_size = 224
    context_length = 1

    def __init__(
        self,
        model: Annotated[str, Role.SCORE, Role.FILE],
        revision: str | None = None,
        wrapper: str | None = None,
        options: dict[str, Any] | None = None,
        task: str | None = None,
        batch_size: Annotated[Count, Role.MACHINE] = 8,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.required_files(model=model, revision=revision, wrapper=wrapper, trust_remote_code=trust_remote_code)
        mteb = optional("mteb", "mteb", f"the encoder {model}")
        self.name, self.batch_size, self._options = model, batch_size, options or {}
        if wrapper is None:
            # MTEB's `get_model` needs torchcodec, although videos are decoded here.
            meta = mteb.get_model_meta(model, revision)
            given = meta.loader_kwargs | self._options
            self._wrapper = meta.loader(model, revision=meta.revision, device="cpu", **given)
            self._wrapper.mteb_model_meta = meta
        else:
            self._wrapper = _imported(wrapper)(model, revision, device="cpu", **self._options)
        parts = {name: part for name, part in vars(self._wrapper).items() if isinstance(part, nn.Module)}
        self.parts = nn.ModuleDict(parts).eval().requires_grad_(False)
        self.task = _task_metadata(task)
        self._used: set[int] = set()  # numbers of frames that the model has selected from a video
        gray = DecodedFrames(torch.full((2, 3, 64, 64), 127, dtype=torch.uint8), 1.0)
        try:
            text, video = self._encode("text", ["a"]), self._encode("video", [gray])
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{model} cannot encode a text and a video ({type(error).__name__}: {reason}).") from error
        if text.shape != video.shape or text.dim() != 2:
            shapes = f"{tuple(text.shape)} and {tuple(video.shape)}"
            raise UserError(f"{model} returns vectors {shapes} for a text and a video, which cannot be compared.")
        self.dimension = text.shape[1]

    @classmethod
    @override
    def required_files(
        cls,
        *,
        model: str = "",
        revision: str | None = None,
        wrapper: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> list[Path]:
        mteb = optional("mteb", "mteb", f"the encoder {model}")
        if wrapper is not None:
            if not Path(model).is_dir():
                raise MissingWeightsError(f"the folder {model} does not exist", "Set encoder.model to a folder.")
            loader: Any = _imported(wrapper)
        else:
            try:
                meta = mteb.get_model_meta(model, revision, fetch_from_hf=False)
            except (KeyError, ValueError) as error:
                raise UserError(f"MTEB has no model {model}. Set encoder.wrapper for a folder of weights.") from error
            if not {"text", "video"} <= set(meta.modalities):
                found = " and ".join(meta.modalities)
                raise UserError(f"{model} encodes {found} in MTEB. Choose a model for text and video.")
            if "dense" not in meta.model_type:
                raise UserError(f"{model} does not return one vector per video. Choose a dense model.")
            loader, revision = meta.loader, revision or meta.revision
            if isinstance(meta.loader_kwargs.get("trust_remote_code"), bool) and not trust_remote_code:
                raise _untrusted(model)
            missing = meta._missing_dependencies(meta.extra_requirements_groups or [])
            if missing:
                packages = ", ".join(each.partition(";")[0] for each in missing)
                raise UserError(f"{model} needs packages that are missing: {packages}. Install them.")
        if not trust_remote_code and "trust_remote_code=True" in inspect.getsource(loader):
            raise _untrusted(model)
        if wrapper is not None:
            return [Path(model)]
        config = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(config, str):
            cache = huggingface_hub.constants.HF_HUB_CACHE
            fix = f"{how_to_download(model).removesuffix('`')} --revision {revision}`"
            raise MissingWeightsError(f"the model {model} is missing in {cache}", fix)
        return [Path(config).parent]

    @torch.no_grad()
    def _encode(self, column: Literal["text", "video"], values: Sequence[Any]) -> Tensor:
        """Return the vectors (N, D) float32 of captions or of videos as decoders."""
        from mteb.types import PromptType

        parameter = next(self.parts.parameters(), None)
        if parameter is not None and hasattr(self._wrapper, "device"):
            self._wrapper.device = str(parameter.device)
        loader = DataLoader(_Column(column, values), self.batch_size, collate_fn=_joined)
        found = self._wrapper.encode(
            loader, task_metadata=self.task, hf_split="test", hf_subset="default", show_progress_bar=False,
            prompt_type=PromptType.query if column == "text" else PromptType.document,
        )  # fmt: skip
        vectors = found if isinstance(found, Tensor) else torch.from_numpy(np.asarray(found))
        return vectors.float().to("cpu" if parameter is None else parameter.device)

    @override
    def positions(self, words: int) -> int:
        return 1

    @override
    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        sentence = self._encode("text", captions)
        mask = torch.ones(len(sentence), 1, dtype=torch.bool, device=sentence.device)
        return TextFeatures(sentence, sentence.unsqueeze(1).clone(), mask)

    @override
    def encode_media(self, media: Media, patches: bool = False) -> VideoFeatures:
        clips = []
        for number, clip in enumerate(media.pixels):
            if not isinstance(clip, ClipFile):
                times = torch.zeros(1) if media.times is None else media.times[number]
                clip = DecodedFrames(clip.cpu(), float(times.max()) + 1.0)
            clips.append(_Counted(clip, self._used))
        frames = self._encode("video", clips).unsqueeze(1)
        return VideoFeatures(frames, torch.ones(len(frames), 1, dtype=torch.bool, device=frames.device))

    @override
    def inputs_used(self) -> dict[str, object]:
        return {"frames": sorted(self._used), "prompt": self.task.prompt}

    @override
    def initial_logit_scale(self) -> float:
        return float(np.log(100.0))

    @override
    def configuration(self) -> dict[str, object]:
        return {
            "wrapper": f"{type(self._wrapper).__module__}.{type(self._wrapper).__qualname__}",
            "options": sorted(self._options.items()),
            "prompt": self.task.prompt,
        }


class _Column(Dataset[dict[str, Any]]):
    """Dataset of one column in the form that MTEB's loaders use, with the names of its `features`."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        self.features, self.values = {name: None}, values
        self.column_names = [name]
        self.name = name

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {self.name: self.values[index]}


class _Counted:
    """Decoder of a clip that records the number of selected frames."""

    def __init__(self, clip: ClipFile | DecodedFrames, used: set[int]) -> None:
        self._clip, self._used, self.metadata = clip, used, clip.metadata

    def get_frames_at(self, indices: Sequence[int]) -> Any:
        self._used.add(len(indices))
        return self._clip.get_frames_at(indices)


def _joined(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"encoder.wrapper {path} cannot be imported ({error}). Check its import path.") from error


def _untrusted(model: str) -> UserError:
    return UserError(f"{model} runs the code of its repository. If you trust it, set trust_remote_code: true.")


def _task_metadata(task: str | None) -> Any:
    """Return MTEB's description of a task, or of MSRVTTT2V without its prompt."""
    import mteb

    try:
        with warnings.catch_warnings(action="ignore"):  # some tasks warn that their data may change, but it is not used
            metadata = mteb.get_task(task or "MSRVTTT2V").metadata
    except KeyError as error:
        raise UserError(f"encoder.task: MTEB has no task {task}. Use the name of a task, such as MSRVTTT2V.") from error
    # MTEB has no prompt for a task with an unknown name.
    return metadata if task else metadata.model_copy(update={"prompt": None, "name": "your own data"})
