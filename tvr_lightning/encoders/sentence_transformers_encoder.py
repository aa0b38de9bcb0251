"""Videos, frames, and captions of any sentence-transformers model that accepts them."""

import json
import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders.base import Encoder, Tower
from tvr_lightning.encoders.compiled import blocks_of
from tvr_lightning.encoders.hub import how_to_download, repository_folder
from tvr_lightning.encoders.video_input import FEWEST_TOKENS, VideoOptions, video_input
from tvr_lightning.errors import UserError, optional
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.option_types import Count, Role

WeightDtype = Literal["float32", "bfloat16"]
TOWERS: dict[Tower, tuple[str, ...]] = {"text": ("text_model", "language_model"), "video": ("vision_model", "visual")}
"""Names of the transformers of CLIP, SigLIP, and vision-language models in transformers."""
MOST_WORDS = 256


def punctuated(instruction: str) -> str:
    """Return an instruction with a period if it has no final punctuation (Qwen3-VL-Embedding, `format_model_input`)."""
    instruction = instruction.strip()
    ends = not instruction or unicodedata.category(instruction[-1]).startswith("P")
    return instruction if ends else f"{instruction}."


def _settings(folder: Path, name: str) -> Any:
    """Return the content of a JSON file of a repository, empty if it is missing."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _padded(found: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the token vectors (N, T, D) that the model uses, padded at the end, and their mask (N, T)."""
    masks = found["attention_mask"].bool()
    tokens = pad_sequence([each[mask] for each, mask in zip(found["token_embeddings"], masks, strict=True)], True)
    return tokens, torch.arange(tokens.shape[1], device=tokens.device) < masks.sum(1, keepdim=True)


class SentenceTransformersEncoder(Encoder):
    """Model of sentence-transformers for texts and videos or images, such as Qwen3-VL-Embedding, ColQwen, or SigLIP.

    Captions are encoded as queries, and videos or frames as documents, with the prompts that the model's configuration
    names for them. A video has one vector, the only frame (M, 1, D). A model with several vectors per input
    (`MultiVectorEncoder`) returns one per token of a video (M, T, D), and the token vectors of a caption as words. For
    other models, words are the last W token vectors, after the prompt, if they have the dimension of the sentence;
    otherwise the sentence is the only word. There are no patches.

    Args:
        weights: repository on the Hugging Face Hub, read from its cache, or folder.
        image_size: side of the square frames for `input: frames` in pixels, which the model's processor may resize.
        dtype: data type of the weights.
        trust_remote_code: whether to run the code of the repository, which some models need.
        input: `video` encodes a clip as one video, the default for models that accept videos; `frames` encodes every
            frame as an image.
        video_options: sizes and times of the frames of a video.
        query_instruction: instruction for captions, instead of the model's prompt.
        document_instruction: instruction for videos or frames, instead of the model's prompt.
        generation_prompt: whether the chat template adds the beginning of an answer, whose last token is then pooled.
        max_length: maximum number of tokens; None uses the model's.
        dimension: number of leading entries of the vectors that are used (Matryoshka); None uses all of them.
        batch_tokens: maximum number of tokens in a pass of more than one video.
    """

    gives_patches = False

    def __init__(
        self,
        weights: Annotated[str, Role.SCORE, Role.FILE],
        image_size: int = 224,
        dtype: WeightDtype = "float32",
        trust_remote_code: bool = False,
        input: Literal["video", "frames"] | None = None,
        video_options: VideoOptions | None = None,
        query_instruction: str | None = None,
        document_instruction: str | None = None,
        generation_prompt: bool = False,
        max_length: Count | None = None,
        dimension: Count | None = None,
        batch_tokens: Annotated[Count, Role.MACHINE] = 8192,
    ) -> None:
        super().__init__()
        (folder,) = self.required_files(weights=weights, trust_remote_code=trust_remote_code, input=input)
        library = optional("sentence_transformers", "vlm", f"the encoder {weights}")
        self.name, self.image_size = weights, image_size
        self.several = _settings(folder, "config_sentence_transformers.json").get("model_type") == "MultiVectorEncoder"
        kind = library.MultiVectorEncoder if self.several else library.SentenceTransformer
        self.model: Any = kind(
            str(folder), device="cpu", trust_remote_code=trust_remote_code,
            local_files_only=True, model_kwargs={"dtype": dtype},
        )  # fmt: skip
        prompts, default = self.model.prompts, self.model.prompts.get(str(self.model.default_prompt_name))
        self.query_prompt = prompts.get("query", default)
        documents = (prompts[name] for name in ("document", "passage", "corpus") if name in prompts)
        self.document_prompt = next(documents, default)
        if query_instruction is not None:
            self.query_prompt = punctuated(query_instruction)
        if document_instruction is not None:
            self.document_prompt = punctuated(document_instruction)
        if max_length is not None:
            self.model.max_seq_length = max_length
        takes_video = "video" in self.model.modalities
        self.input = input or ("video" if takes_video else "frames")
        self.video = video_options or VideoOptions()
        self.generation_prompt, self.batch_tokens = generation_prompt, batch_tokens
        if self.input == "video":
            self.resize_mode, self.gives_frames = "unchanged", False
            processor = self.model.processor.video_processor
            self.patch = getattr(processor, "patch_size", 32) * getattr(processor, "merge_size", 1)
            self.together = getattr(processor, "temporal_patch_size", 1)
            fewest = FEWEST_TOKENS if self.video.resize == "published" else 1
            self.most_frames = self.together * int(self.model.max_seq_length or 2**31) // fewest
        elif takes_video:
            self.remarks = [
                f"{weights} was given single frames, whose order has no effect, instead of videos as published"
            ]
        self.kept = dimension
        with torch.no_grad():
            found = self._encode(["a"], self.query_prompt, "query")
        self.model.train()  # as other encoders start; the library loads models in eval mode
        tokens = found.get("token_embeddings", torch.empty(0))
        self.dimension = (tokens if self.several else found["sentence_embedding"]).shape[-1]
        if dimension is not None and self.dimension < dimension:
            raise UserError(f"dimension {dimension} is more than the {self.dimension} of {weights}")
        words = min(int(self.model.max_seq_length or MOST_WORDS), MOST_WORDS)
        self.context_length = words if tokens.shape[-1] == self.dimension else 1
        for name, parameter in self.model.named_parameters():
            if name.endswith(("logit_scale", "logit_bias")):  # the method has its own
                parameter.requires_grad_(False)

    @classmethod
    @override
    def required_files(
        cls,
        *,
        weights: str = "",
        trust_remote_code: bool = False,
        input: Literal["video", "frames"] | None = None,
        **options: Any,
    ) -> list[Path]:
        fix = f"{how_to_download(weights)}, or name a folder: encoder.weights=/path/to/folder"
        folder = repository_folder(weights, ["modules.json", "config.json"], f"the model {weights} is missing", fix)
        processors = [path.read_text(encoding="utf-8") for path in folder.rglob("*processor_config.json")]
        if not any("image" in text for text in processors):
            raise UserError(f"{weights} does not accept images. Choose a model for texts and images.")
        if input == "video" and not any("video_processor" in text for text in processors):
            raise UserError(f"{weights} does not accept videos. Set input to frames, or choose another model.")
        modules: Any = _settings(folder, "modules.json")
        own = [each["type"] for each in modules if not each["type"].startswith(("sentence_transformers.", "pylate."))]
        if not trust_remote_code and (own or "auto_map" in _settings(folder, "config.json")):
            raise UserError(
                f"{weights} needs code from its repository, which is not run. Read the code, and set "
                "trust_remote_code to true if you trust it."
            )
        return [folder]

    def _encode(self, inputs: Sequence[Any], prompt: str | None, task: str, **processing: Any) -> dict[str, Tensor]:
        """Return the model's outputs, with gradients, which its `encode_query` and `encode_document` do not have."""
        if self.generation_prompt:
            processing["chat_template"] = {"add_generation_prompt": True}
        given = self.model.preprocess(list(inputs), prompt=prompt, task=task, processing_kwargs=processing)
        most, device = self.model.max_seq_length, self.model.device
        if processing.get("video") and most and given["input_ids"].shape[1] > most:
            raise UserError(
                f"A clip has {given['input_ids'].shape[1]} tokens, but {self.name} takes {most}. Lower "
                "data.init_args.frames or total_pixels."
            )
        given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
        outputs: dict[str, Tensor] = self.model(given, task=task)
        for part in self.model.modules():
            if hasattr(part, "rope_deltas"):  # of these inputs, for generation
                part.rope_deltas = None
        return {
            name: value[..., : self.kept] if name.endswith("_embedding") or name == "token_embeddings" else value
            for name, value in outputs.items()
        }

    @override
    def positions(self, words: int) -> int:
        return min(words, self.context_length)

    @override
    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        found = self._encode(captions, self.query_prompt, "query")
        if self.several:
            tokens, mask = _padded(found)
            mean = tokens.sum(1) / mask.sum(1, keepdim=True)
            return TextFeatures(mean, tokens[:, :words], mask[:, :words]).padded(words).float()
        sentence = found["sentence_embedding"]
        if self.context_length == 1:
            mask = torch.ones(len(sentence), 1, dtype=torch.bool, device=sentence.device)
            return TextFeatures(sentence, sentence.unsqueeze(1).clone(), mask).float()
        masks = found["attention_mask"].bool()
        last = [tokens[mask][-words:] for tokens, mask in zip(found["token_embeddings"], masks, strict=True)]
        lengths = masks.sum(1, keepdim=True)
        last[0] = nn.functional.pad(last[0], (0, 0, 0, words - len(last[0])))
        mask = torch.arange(words, device=sentence.device) < lengths
        return TextFeatures(sentence, pad_sequence(last, batch_first=True), mask).float()

    @override
    def encode_media(self, media: Media, patches: bool = False) -> VideoFeatures:
        if self.input == "video":
            return self._encode_clips(media)
        assert isinstance(media.pixels, Tensor)
        pixels = media.pixels.flatten(0, 1).permute(0, 2, 3, 1).cpu().float().round().clamp(0, 255).byte().numpy()
        found = self._encode([Image.fromarray(frame) for frame in pixels], self.document_prompt, "document")
        frames = found["sentence_embedding"].unflatten(0, media.pixels.shape[:2]).clone()
        return VideoFeatures(frames, media.frame_mask.to(frames.device).bool()).float()

    def _encode_clips(self, media: Media) -> VideoFeatures:
        """Encode M clips as videos to one frame (M, 1, D), or to one per token (M, T, D)."""
        assert media.times is not None
        clips, parts, used = [], [], 0
        for frames, times in zip(media.pixels, media.times, strict=True):
            clips.append(video_input(frames, times[: len(frames)], self.video, self.patch, self.together))
        sizes = [clip["video"]["array"][:, 0].numel() // self.patch**2 // self.together for clip in clips]
        groups: list[list[Any]] = []
        for clip, tokens in zip(clips, sizes, strict=True):
            if not groups or used + tokens > self.batch_tokens:
                groups.append([])
                used = 0
            groups[-1].append(clip)
            used += tokens
        resizing = self.video.resize == "processor"
        for group in groups:
            found = self._encode(
                group, self.document_prompt, "document", text={"truncation": False},
                video={"do_sample_frames": False, "do_resize": resizing},
            )  # fmt: skip
            if self.several:
                parts.append(VideoFeatures(*_padded(found)))
            else:
                frame = found["sentence_embedding"].unsqueeze(1).clone()
                parts.append(VideoFeatures(frame, torch.ones_like(frame[..., 0], dtype=torch.bool)))
        return VideoFeatures.cat(parts).float()

    @override
    def initial_logit_scale(self) -> float:
        return float(getattr(self.model.transformers_model, "logit_scale", math.log(100.0)))

    @override
    def initial_logit_bias(self) -> float:
        return float(getattr(self.model.transformers_model, "logit_bias", 0.0))

    @override
    def blocks(self, tower: Tower) -> list[nn.Module]:
        parts = [part for name, part in self.model.named_modules() if name.rpartition(".")[2] in TOWERS[tower]]
        return blocks_of(parts[0]) if parts else []

    @override
    def configuration(self) -> dict[str, object]:
        return {
            "modules": [(type(part).__name__, part.get_config_dict()) for part in self.model],
            "prompts": (self.query_prompt, self.document_prompt, self.generation_prompt),
            "input": (self.input, self.model.max_seq_length, self.kept),
            **(
                {"video": (vars(self.video), sorted(self.model.processor.video_processor.to_dict().items()))}
                if self.input == "video"
                else {
                    "image_size": self.image_size,
                    "images": sorted(self.model.processor.image_processor.to_dict().items()),
                }
            ),
            "vocabulary": sorted(self.model.tokenizer.get_vocab().items()),
        }
