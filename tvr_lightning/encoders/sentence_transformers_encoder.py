"""Frames and captions of any sentence-transformers model that accepts images."""

import math
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
from tvr_lightning.encoders.hub import how_to_download, optional, repository_folder
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.option_types import Role

WeightDtype = Literal["float32", "bfloat16"]
TOWERS: dict[Tower, tuple[str, ...]] = {"text": ("text_model", "language_model"), "video": ("vision_model", "visual")}
"""Names of the transformers of CLIP, SigLIP, and vision-language models in transformers."""
MOST_WORDS = 256


class SentenceTransformersEncoder(Encoder):
    """Model of sentence-transformers for texts and images, such as Qwen3-VL-Embedding, jina-embeddings-v4, or SigLIP.

    Captions are encoded as queries and frames as documents, with the prompts that the model's configuration names for
    them. If the model returns token vectors in the space of the sentence, the words are the last W of them, which
    follow the prompt; otherwise the sentence is the only word. There are no patches.

    Args:
        weights: repository on the Hugging Face Hub, read from its cache, or folder.
        image_size: side of the square frames in pixels, which the model's processor may resize.
        dtype: data type of the weights.
        trust_remote_code: whether to run the code of the repository, which some models need.
    """

    gives_patches = False

    def __init__(
        self,
        weights: Annotated[str, Role.SCORE, Role.FILE],
        image_size: int = 224,
        dtype: WeightDtype = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        (folder,) = self.required_files(weights=weights)
        library = optional("sentence_transformers", "vlm", f"the encoder {weights}")
        self.name, self.image_size = weights, image_size
        self.model: Any = library.SentenceTransformer(
            str(folder), device="cpu", trust_remote_code=trust_remote_code,
            local_files_only=True, model_kwargs={"dtype": dtype},
        )  # fmt: skip
        prompts, default = self.model.prompts, self.model.prompts.get(str(self.model.default_prompt_name))
        self.query_prompt = prompts.get("query", default)
        documents = (prompts[name] for name in ("document", "passage", "corpus") if name in prompts)
        self.document_prompt = next(documents, default)
        with torch.no_grad():
            found = self._encode(["a"], self.query_prompt, "query")
        self.model.train()  # as other encoders start; the library loads models in eval mode
        self.dimension = found["sentence_embedding"].shape[-1]
        tokens = found.get("token_embeddings", torch.empty(0))
        words = min(int(self.model.max_seq_length or MOST_WORDS), MOST_WORDS)
        self.context_length = words if tokens.shape[-1] == self.dimension else 1
        for name, parameter in self.model.named_parameters():
            if name.endswith(("logit_scale", "logit_bias")):  # the method has its own
                parameter.requires_grad_(False)

    @classmethod
    @override
    def required_files(cls, *, weights: str = "", **options: Any) -> list[Path]:
        fix = f"{how_to_download(weights)}, or name a folder: encoder.weights=/path/to/folder"
        folder = repository_folder(weights, ["modules.json", "config.json"], f"the model {weights} is missing", fix)
        if not any("image" in path.read_text(encoding="utf-8") for path in folder.rglob("*processor_config.json")):
            raise UserError(f"{weights} does not accept images. Choose a model for texts and images.")
        return [folder]

    def _encode(self, inputs: Sequence[Any], prompt: str | None, task: str) -> dict[str, Tensor]:
        """Return the model's outputs, with gradients, which its `encode_query` and `encode_document` do not have."""
        given, device = self.model.preprocess(list(inputs), prompt=prompt, task=task), self.model.device
        given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
        outputs: dict[str, Tensor] = self.model(given, task=task)
        for part in self.model.modules():
            if hasattr(part, "rope_deltas"):  # of these inputs, for generation
                part.rope_deltas = None
        return outputs

    @override
    def positions(self, words: int) -> int:
        return min(words, self.context_length)

    @override
    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        found = self._encode(captions, self.query_prompt, "query")
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
        pixels = media.pixels.flatten(0, 1).permute(0, 2, 3, 1).cpu().float().round().clamp(0, 255).byte().numpy()
        found = self._encode([Image.fromarray(frame) for frame in pixels], self.document_prompt, "document")
        frames = found["sentence_embedding"].unflatten(0, media.pixels.shape[:2]).clone()
        return VideoFeatures(frames, media.frame_mask.to(frames.device).bool()).float()

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
            "prompts": (self.query_prompt, self.document_prompt),
            "image_size": self.image_size,
            "images": sorted(self.model.processor.image_processor.to_dict().items()),
            "vocabulary": sorted(self.model.tokenizer.get_vocab().items()),
        }
