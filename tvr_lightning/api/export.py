"""Export to ONNX: both encoders of a method, and its head if scores need more than one vector per side.

Also export of the encoder as an open_clip checkpoint.
"""

import dataclasses
import json
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import open_clip
import torch
from torch import Tensor, nn
from torch.export import Dim
from typing_extensions import override

from tvr_lightning.api.model import Model, load, zero_shot
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.tuning import AdapterLayers, merge_lora
from tvr_lightning.errors import UserError, optional
from tvr_lightning.features import FeatureBatch, TextFeatures, VideoFeatures
from tvr_lightning.files import TEMPORARY, explain_write_errors
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.stochastic import trial_draws
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.training.checkpoints import check_target, write_checkpoint

OPSET = 18  # version of ONNX's operators, the oldest that torch's exporter supports
TOLERANCE = 1e-4  # relative to the largest value of a tensor if that is above 1
HEAD = "head.onnx"
INPUTS = 10  # on which torch and onnxruntime are compared
EXAMPLE = Path(__file__).with_name("onnx_example.py")
TEXT, VIDEO = ([field.name for field in dataclasses.fields(kind)] for kind in (TextFeatures, VideoFeatures))
Named = dict[str, Tensor]


class _Graph(nn.Module, ABC):
    """Part of a method as a function of named tensors; `inputs` are examples of them."""

    def __init__(self, method: RetrievalModule, inputs: Named, pooled: bool = False) -> None:
        super().__init__()
        self.method = method
        self.inputs = inputs
        self.pooled = pooled

    @abstractmethod
    def named(self, given: Named) -> Named:
        """Return the outputs by name."""

    @override
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.named(dict(zip(self.inputs, tensors, strict=True))).values())


class _Text(_Graph):
    @override
    def named(self, given: Named) -> Named:
        encoder = cast(OpenClipEncoder, self.method.encoder)
        found = self.method.encode_text(encoder.encode_tokens(given["ids"], given["word_mask"]))
        return _without_masks(found) | ({"text_vector": unit(found.sentence)} if self.pooled else {})


class _Video(_Graph):
    @override
    def named(self, given: Named) -> Named:
        media = Media(given["pixels"], given["frame_mask"])
        found = self.method.encode_video(self.method.encoder.encode_media(media, self.method.needs_patches))
        pooled = {"video_vector": unit(self.method.compact_video(found).frames[:, 0])} if self.pooled else {}
        return _without_masks(found) | pooled


class _Head(_Graph):
    @override
    def named(self, given: Named) -> Named:
        return {"scores": self.method.score(*_features(given)).similarity}


def _features(given: Named) -> tuple[TextFeatures, VideoFeatures]:
    """Return the features among named tensors."""
    text, video = ({name: given[name] for name in names if name in given} for names in (TEXT, VIDEO))
    return TextFeatures(**text), VideoFeatures(**video)


def _without_masks(features: FeatureBatch) -> Named:
    """Return features by name, without the masks, which encoders return unchanged."""
    return {name: value for name, value in vars(features).items() if value is not None and not name.endswith("mask")}


def export(
    source: str | Path,
    out: str | Path,
    *,
    weights: str | None = None,
    frames: int | None = None,
    trust: Sequence[str] = (),
) -> list[str]:
    """Export a method to ONNX in a new folder, and return lines about its files and their differences from torch.

    `text.onnx` and `video.onnx` are the encoders in float32, including LoRA. If scores are cosines of one vector per
    side, the encoders also return these vectors. Otherwise `head.onnx` computes the scores of N texts and M videos from
    their features. The other files are `export.json` (axes, opset, preprocessing), `tokenizer.json`, and `example.py`,
    which needs no torch.

    Args:
        source: Checkpoint or `hf:user/name`, as for `load`, or an open_clip architecture, as for `zero_shot`.
        out: New folder for the files.
        weights: Weights of the architecture. Default: `openai`.
        frames: Number of frames per video of the architecture. Default: 12.
        trust: Modules whose classes the checkpoint may name, as for `load`.

    Raises:
        UserError: `out` exists, a library is missing, the method cannot be exported, or the results of onnxruntime
            differ from those of torch. Nothing is written.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists. Choose a new folder, or delete it.")
    for library in ("onnx", "onnxscript", "onnxruntime"):
        optional(library, "onnx", "tvr export")
    is_architecture = not Path(source).exists() and str(source) in open_clip.list_models()
    if is_architecture:
        model = zero_shot(str(source), weights or "openai", frames or 12, "cpu")
    elif weights is not None or frames is not None:
        raise UserError(f"{source} is not an open_clip architecture. Omit weights and frames, which only apply to one.")
    else:
        model = load(source, "cpu", trust)
    method = model.module
    if reason := obstacle(method):
        raise UserError(f"{method.title} cannot be exported: {reason}.")
    merge_lora(method.encoder)
    method.float().requires_grad_(False)
    tokenizer = cast(OpenClipEncoder, method.encoder).tokenizer.portable(method.words)
    with (
        explain_write_errors(out, "Nothing was written."),
        tempfile.TemporaryDirectory(TEMPORARY, f".{out.name}-", out.absolute().parent) as folder,
    ):
        made = Path(folder) / out.name  # the temporary folder can only be read by its owner
        made.mkdir()
        files, lines = _write(model, made)
        settings = {"opset": OPSET, **_settings(model), "files": files}
        (made / "export.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        (made / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
        (made / "example.py").write_bytes(EXAMPLE.read_bytes())
        made.rename(out)
    return lines


def merge(checkpoint: str | Path, out: str | Path, trust: Sequence[str] = ()) -> None:
    """Write the encoder of a trained method, with the changes of LoRA, as a file for open_clip's `load_checkpoint`.

    Args:
        checkpoint: Checkpoint or `hf:user/name`, as for `load`.
        out: File to write.
        trust: Modules whose classes the checkpoint may name, as for `load`.

    Raises:
        UserError: `out` is the checkpoint, the encoder is not an open_clip model, or its layers are not open_clip's.
    """
    check_target(Path(out), Path(checkpoint))
    module = load(checkpoint, trust=trust).module
    encoder = module.encoder
    if not isinstance(encoder, OpenClipEncoder) or isinstance(encoder.clip, open_clip.CoCa):
        raise UserError(f"{checkpoint}: open_clip cannot load {type(encoder).__name__}, or needs CoCa's text decoder.")
    added = any(isinstance(part, AdapterLayers) for part in encoder.modules())
    if added or encoder.patch_shift is not None or encoder.token_merging is not None:
        raise UserError(
            f"{checkpoint}: open_clip has no model with adapters, patch_shift, or token_merging. Tune with LoRA."
        )
    merge_lora(encoder)
    state = {**encoder.clip.state_dict(), "logit_scale": module.temperature.logit_scale.detach().reshape(())}
    if bias := encoder.initial_logit_bias():
        state["logit_bias"] = torch.tensor(bias)
    write_checkpoint(state, Path(out))


def obstacle(method: RetrievalModule) -> str:
    """Return the reason why a method cannot be exported, or an empty string."""
    if not isinstance(method.encoder, OpenClipEncoder):
        return (
            f"{type(method.encoder).__name__} prepares its inputs in Python. Only open_clip's encoders can be exported"
        )
    if getattr(method, "audio_encoder", None) is not None:
        return "it reads audio. Only methods of texts and frames can be exported"
    return ""


def _settings(model: Model) -> dict[str, Any]:
    """Return the settings that a client needs to prepare the inputs."""
    method = model.module
    encoder = cast(OpenClipEncoder, method.encoder)
    return {
        "method": method.title,
        "encoder": encoder.name,
        "captions": "ftfy.fix_text, html.unescape twice, strip, then tokenizer.json",
        "words": method.words,
        "sampling": model.scorer.sampling,
        "frames": method.frames,
        "preparation": dataclasses.asdict(model.scorer.preparation),
        "pixels": "RGB from 0 to 255, which video.onnx normalizes; padded frames are 0 and False in frame_mask",
        "mean": encoder.pixel_mean.flatten().tolist(),
        "std": encoder.pixel_std.flatten().tolist(),
    }


def _write(model: Model, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the graphs to a folder, compare them with torch, and return their description and lines to print."""
    import onnxruntime

    method = model.module
    antialias = model.scorer.preparation.antialias
    given = _inputs(method, antialias, 5, 3, method.frames)
    text, video = ({name: given[name] for name in names} for names in (("ids", "word_mask"), ("pixels", "frame_mask")))
    found = given | _Text(method, text).named(text) | _Video(method, video).named(video)
    pooled = _is_pooled(method, *_features(found))
    graphs: dict[str, _Graph] = {"text.onnx": _Text(method, text, pooled), "video.onnx": _Video(method, video, pooled)}
    if not pooled:
        features = {name: value for name, value in found.items() if name not in ("ids", "pixels")}
        graphs[HEAD] = _Head(method, features)
    any_frames = _takes_any_frames(method, antialias)
    sessions: dict[str, Any] = {}
    for name, graph in graphs.items():
        try:
            _convert(graph, folder / name, any_frames)
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # the exporter's own message comes last, after advice for its developers
                cause = cause.__cause__
            reason = str(cause).strip().partition("\n")[0][:300]
            raise UserError(f"{method.title} cannot be exported: torch cannot trace {name}: {reason}") from error
        sessions[name] = onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
    differences: dict[str, float] = {}
    for place in range(INPUTS):
        frames = max(method.frames - place % 3, 1) if any_frames else method.frames
        given = _inputs(method, antialias, 1 + 7 * place % INPUTS, 1 + place % 3, frames, place)
        for name, difference in _differences(method, graphs, sessions, given, copies=1 + 3 * place).items():
            differences[name] = max(differences.get(name, 0.0), difference)
    lines = []
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise UserError(
                f"{method.title} cannot be exported: {name} differs from torch by {difference:.1e}, more than "
                f"{TOLERANCE:.0e}."
            )
        lines.append(f"{name}: differs from torch by at most {difference:.1e} on {INPUTS} inputs")
    files: dict[str, Any] = {}
    for name, session in sessions.items():
        axes = {
            side: {node.name: [node.type.removeprefix("tensor(").removesuffix(")"), *node.shape] for node in nodes}
            for side, nodes in (("inputs", session.get_inputs()), ("outputs", session.get_outputs()))
        }
        files[name] = {**axes, "largest_difference": differences[name]}
    return files, lines


def _inputs(method: RetrievalModule, antialias: bool, texts: int, videos: int, frames: int, seed: int = 0) -> Named:
    """Return token ids of captions and random frames, both with padding."""
    encoder = cast(OpenClipEncoder, method.encoder)
    generator = torch.Generator().manual_seed(seed)
    tokens = encoder.tokenizer.encode([" a dog runs on the beach" * (row + seed) for row in range(texts)], method.words)
    shape = (videos, frames, 3, encoder.image_size, encoder.image_size)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    frame_mask = torch.arange(frames) <= (frames - 1 - torch.arange(videos)).clamp(min=0).unsqueeze(1)
    pixels = pixels.masked_fill(~frame_mask[:, :, None, None, None], 0)
    pixels = pixels if antialias else pixels.half()
    return {"ids": tokens.ids, "word_mask": tokens.mask, "pixels": pixels, "frame_mask": frame_mask}


def _is_pooled(method: RetrievalModule, text: TextFeatures, video: VideoFeatures) -> bool:
    """Return whether scores are cosines of the sentence and of the one vector to which a method compacts a video."""
    if not method.compacts_texts():
        return False
    frames = method.compact_video(video).frames
    cosines = unit(method.compact_text(text).sentence) @ unit(frames[:, 0]).T
    return frames.shape[1] == 1 and torch.allclose(cosines, method.score(text, video).similarity, atol=TOLERANCE)


def _takes_any_frames(method: RetrievalModule, antialias: bool) -> bool:
    """Return whether videos may have fewer frames than the method's, so that no layer has a weight per frame."""
    if method.frames == 1:
        return False
    given = _inputs(method, antialias, 5, 3, method.frames - 1)
    try:
        found = given | _Text(method, given).named(given) | _Video(method, given).named(given)
        _Head(method, found).named(found)
    except (UserError, RuntimeError):
        return False
    return True


def _convert(graph: _Graph, file: Path, any_frames: bool) -> None:
    """Write a graph with the dynamic axes N (texts), M (videos), and, with `any_frames`, F (frames)."""
    import onnx_ir
    from onnxscript import opset18

    def stable_sort(values: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        position: Any = opset18.Constant(value_ints=[dim])
        size = opset18.Gather(opset18.Shape(values), position)
        return opset18.TopK(values, size, axis=dim, largest=int(descending), sorted=1)  # ties keep their order

    names = list(graph.inputs)
    of_text = ["ids", *TEXT]
    frames = {1: Dim.DYNAMIC} if any_frames else {}
    axes = [{0: Dim.DYNAMIC} | ({} if name in of_text else frames) for name in names]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its operator has no ONNX equivalent
    torch.compiler.assume_constant_result(trial_draws)  # samples of T-MASS, from a seed
    try:
        # With gradients enabled, no branch depends on values, which the device would have to return first. Branches
        # that depend on sizes differ only in their cost, so any of them is correct for all sizes.
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.export.export(
                graph.eval(),
                tuple(graph.inputs.values()),
                dynamic_shapes=(tuple(axes),),
                strict=True,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            outputs = list(graph.named(graph.inputs))
            made = torch.onnx.export(
                traced,
                dynamo=True,
                opset_version=OPSET,
                input_names=names,
                output_names=outputs,
                custom_translation_table={torch.ops.aten.sort.stable: stable_sort},
                verbose=False,
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    assert made is not None
    inner: Any = made.model.graph
    symbols = {}
    for value in inner.inputs:
        for place, size in enumerate(value.shape):
            symbols[str(size)] = "F" if place else "N" if value.name in of_text else "M"
    for value in [*inner.inputs, *inner.outputs]:
        sizes = [size if isinstance(size, int) else symbols.get(str(size), str(size)) for size in value.shape]
        value.shape = onnx_ir.Shape(sizes)
    for value in [value for value in inner.inputs if not value.uses()]:
        inner.inputs.remove(value)  # such as words, if the score does not use them
    made.save(file)


def _differences(
    method: RetrievalModule, graphs: dict[str, _Graph], sessions: dict[str, Any], given: Named, copies: int
) -> dict[str, float]:
    """Return the largest difference of each file from torch. The head receives the encoded videos `copies` times."""
    expected = dict(given)
    found = dict(given)
    differences = {}
    for name, graph in graphs.items():
        if name == HEAD:
            for tensors in (expected, found):
                tensors |= {key: torch.cat([tensors[key]] * copies) for key in VIDEO if key in tensors}
        ours = graph.named(expected)
        fed = {node.name: found[node.name].numpy() for node in sessions[name].get_inputs()}
        theirs = dict(zip(ours, map(torch.from_numpy, sessions[name].run(list(ours), fed)), strict=True))
        differences[name] = max(_difference(theirs[key], value) for key, value in ours.items())
        expected |= ours
        found |= theirs
    if HEAD not in graphs:
        scores = method.score(*_features(expected)).similarity
        differences["text_vector @ video_vector.T"] = _difference(
            found["text_vector"] @ found["video_vector"].T, scores
        )
    return differences


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors of any shape, relative to the largest value if it is above 1."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
