"""Tokenizers of the transformers library, as used by open_clip: SigLIP, CLIPA, multilingual text towers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from open_clip.tokenizer import HFTokenizer
from typing_extensions import override

from tvr_lightning.encoders.hub import how_to_download, repository_folder
from tvr_lightning.encoders.tokenizer import ClipTokenizer, Tokenizer
from tvr_lightning.errors import UserError

VOCABULARIES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
)  # fmt: skip
OTHERS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "config.json")


def build_tokenizer(text: dict[str, Any], architecture: str) -> Tokenizer:
    """Build the tokenizer for open_clip's `text_cfg`, whose `hf_tokenizer_name` is a local folder."""
    options, context_length = dict(text.get("tokenizer_kwargs") or {}), int(text.get("context_length", 77))
    if not text.get("hf_tokenizer_name"):
        return ClipTokenizer(context_length, options.pop("clean", "lower"))
    if text.get("tokenizer_mode"):
        raise UserError(
            f"architecture {architecture} has the tokenizer mode {text['tokenizer_mode']!r}, which is not supported"
        )
    return TransformersTokenizer(Path(text["hf_tokenizer_name"]), context_length, **options)


def tokenizer_folder(source: str, architecture: str, repository: str) -> Path:
    """Return the folder of a tokenizer, named or in the Hub's cache; the other arguments are for the error."""
    return repository_folder(
        source,
        VOCABULARIES,
        f"the tokenizer {source} of {architecture} is missing",
        f"{how_to_download(repository)}, or name a folder: encoder.tokenizer=/path/to/folder",
        files=(*VOCABULARIES, *OTHERS),
    )


class TransformersTokenizer(Tokenizer):
    """Tokenizer of the transformers library, loaded from files, with the text cleaning of open_clip.

    Args:
        folder: folder with the files of the tokenizer.
        context_length: maximum number of positions of the text tower.
        clean: open_clip's name of the cleaning: `whitespace`, `lower`, or `canonicalize` (SigLIP: lower case, no
            punctuation).
        strip_sep_token: whether to remove the token that separates sentences (CLIPA).
        language: language of the captions, for tokenizers that mark it, such as `zho_Hans` (NLLB).

    Raises:
        UserError: transformers is not installed, or the files do not contain a readable tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        context_length: int,
        clean: str = "whitespace",
        strip_sep_token: bool = False,
        language: str | None = None,
    ) -> None:
        super().__init__(context_length)
        try:
            made = HFTokenizer(
                str(folder), context_length, clean, strip_sep_token, language=language, local_files_only=True
            )
        except ModuleNotFoundError as error:
            raise UserError(
                f"the tokenizer in {folder} needs transformers: pip install 'tvr-lightning[encoders]'"
            ) from error
        except (OSError, ValueError, ImportError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{folder} cannot be read as a tokenizer of transformers: {reason}") from error
        self._inner: Any = made.tokenizer
        self._clean = made.clean_fn
        self._described = f"{clean}{', no separator' * strip_sep_token}{f', {language}' if language else ''}"
        self._dropped = self._inner.sep_token_id if strip_sep_token else None
        self.blank_end = int(strip_sep_token)
        self.pad_id = 0 if strip_sep_token else int(self._inner.pad_token_id or 0)
        self.vocabulary_size = len(self._inner)
        backend = getattr(self._inner, "backend_tokenizer", None)
        # Read before any caption, because the rules of a fast tokenizer include how the last one was truncated.
        rules = json.dumps(sorted(self._inner.get_vocab().items())) if backend is None else backend.to_str()
        self._digest = hashlib.sha256(rules.encode()).hexdigest()[:12]

    @override
    def tokens(self, caption: str, words: int | None = None) -> list[int]:
        cut = {} if words is None else {"truncation": True, "max_length": words}
        found = self._inner(self._clean(caption), verbose=False, **cut)["input_ids"]
        if self._dropped is None:
            return list(found)
        # Padding replaces the separator, as in open_clip; at the end it does not count as a token of the caption.
        kept = [self.pad_id if token == self._dropped else token for token in found]
        return kept[:-1] if found[-1] == self._dropped else kept

    @override
    def piece(self, token: int) -> str:
        return str(self._inner.decode([token])).strip()

    @override
    def describe(self) -> str:
        return f"{type(self._inner).__name__} {self._digest}, {self._described}"
