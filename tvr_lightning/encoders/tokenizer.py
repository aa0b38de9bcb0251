"""Tokenization of captions by open_clip's tokenizers, with the truncation and padding of the retrieval papers."""

import hashlib
import json
import logging
import string
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Any

import regex as re
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from typing_extensions import override

from tvr_lightning.data.batch import Tokens
from tvr_lightning.errors import UserError, optional

logger = logging.getLogger(__name__)

VOCABULARIES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
)  # fmt: skip
TOKENIZER_FILES = (
    *VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "config.json",
)  # fmt: skip
OPENAI_SPECIAL = ("<|startoftext|>", "<|endoftext|>")


class Tokenizer(ABC):
    """Base class of tokenizers that map captions to token ids (N, W), with padding at the end.

    `inner` is a tokenizer of open_clip or transformers.
    """

    description: str  # of vocabulary and cleaning, for fingerprints of stored features
    pad_id: int = 0  # fills the positions after a caption
    blank_end: int = 0  # 1 if one position after the caption must contain padding (CLIPA)

    def __init__(self, inner: Any, context_length: int) -> None:
        self._inner = inner
        self.context_length = context_length
        self._reported = False

    @abstractmethod
    def tokens(self, caption: str, words: int | None = None) -> list[int]:
        """Return the ids of a caption with start and end, of which at most `words`; the end is never dropped."""

    def portable(self, words: int) -> dict[str, Any]:
        """Return the content of a tokenizer.json for the library `tokenizers`, with padding to `words` positions.

        Its inputs are captions after `ftfy.fix_text` and `html.unescape` twice.
        """
        rules = self._rules(optional("tokenizers", "onnx", "tvr export"))
        rules.enable_truncation(words)
        rules.enable_padding(length=words, pad_id=self.pad_id)
        found: dict[str, Any] = json.loads(rules.to_str())
        return found

    def _rules(self, library: Any) -> Any:
        """Return the tokenizer of the library `tokenizers`, without truncation and padding."""
        raise UserError(f"{type(self).__name__} cannot be written as a tokenizer.json.")

    def encode(self, captions: list[str], words: int) -> Tokens:
        """Tokenize N captions to `words` positions W, dropping the last tokens before the end of longer captions."""
        if not 3 <= words <= self.context_length:
            raise UserError(
                f"words is {words}; it must be between 3 (SOT, one token, EOT) and the encoder's context length "
                f"{self.context_length}"
            )
        ids = torch.full((len(captions), words), self.pad_id)
        mask = torch.zeros(len(captions), words, dtype=torch.bool)
        needed = []
        for row, caption in enumerate(captions):
            if not isinstance(caption, str):
                raise UserError(f"caption {row} of the batch is {caption!r}, a {type(caption).__name__}; expected text")
            line = self.tokens(caption)
            needed.append(len(line) + self.blank_end)
            if needed[-1] > words:
                line = self.tokens(caption, words)
            ids[row, : len(line)] = torch.tensor(line)
            mask[row, : len(line)] = True
        return Tokens(list(captions), ids, mask, needed)

    def report_truncated(self, tokens: Tokens) -> None:
        """Log the first truncated caption; the results table states how many texts of a test are truncated."""
        words = tokens.ids.shape[1]
        for caption, needed in zip(tokens.captions, tokens.needed, strict=True):
            if needed > words and not self._reported:
                self._reported = True
                message = "A caption needs %d token positions and is truncated to %d before EOT: %r (reported once)"
                logger.warning(message, needed, words, caption)

    def needed(self, caption: str) -> int:
        """Return the number of positions that a caption needs, including start and end."""
        return len(self.tokens(caption)) + self.blank_end

    def pieces(self, caption: str, words: int) -> list[str]:
        """Return the text of each token of a caption in up to `words` positions."""
        return [str(self._inner.decode([token])).strip() for token in self.tokens(caption, words)]


def _cleaning(library: Any, clean: str) -> list[Any]:
    """Return open_clip's text cleaning after `ftfy.fix_text` and `html.unescape`, as normalizers of `tokenizers`."""
    rules = library.normalizers
    spaces = [rules.Replace(library.Regex(r"\s+"), " "), rules.Strip()]
    if clean == "whitespace":
        return spaces
    if clean == "lower":
        return [*spaces, rules.Lowercase()]
    punctuation = library.Regex(f"[{re.escape(string.punctuation)}]")
    return [rules.Replace("_", " "), rules.Replace(punctuation, ""), rules.Lowercase(), *spaces]


@lru_cache
def _byte_pairs(clean: str) -> SimpleTokenizer:
    """Return CLIP's byte-pair encoding for a kind of cleaning; cached, since loading takes a quarter of a second."""
    tokenizer = SimpleTokenizer(clean=clean)
    # The released tokenizers recognize OpenAI's names of the special tokens in a caption, not open_clip's.
    pattern = tokenizer.pat.pattern
    for name, own in zip(OPENAI_SPECIAL, ("<start_of_text>", "<end_of_text>"), strict=True):
        tokenizer.encoder[name] = tokenizer.encoder[own]
        pattern = pattern.replace(own, re.escape(name))
    tokenizer.pat = re.compile(pattern, tokenizer.pat.flags)
    tokenizer.cache = {name: name for name in OPENAI_SPECIAL}
    return tokenizer


class ClipTokenizer(Tokenizer):
    """CLIP's byte-pair encoding, `[SOT] tokens [EOT]`, zero-padded; text is cleaned and lower-cased as in CLIP.

    The padding ID 0 is also the ID of the token "!", so masks are based on the position of EOT and not on the ids
    (CLIP4Clip, dataloaders/dataloader_msrvtt_retrieval.py). EOT is the largest ID. `clean` is open_clip's name of the
    cleaning.
    """

    def __init__(self, context_length: int, clean: str = "lower") -> None:
        super().__init__(_byte_pairs(clean), context_length)
        self.clean = clean
        self.description = "CLIP byte pairs" if clean == "lower" else f"CLIP byte pairs, {clean}"

    @override
    def tokens(self, caption: str, words: int | None = None) -> list[int]:
        found = self._inner.encode(caption)
        return [self._inner.sot_token_id, *(found if words is None else found[: words - 2]), self._inner.eot_token_id]

    @override
    def _rules(self, library: Any) -> Any:
        vocabulary = {name: number for name, number in self._inner.encoder.items() if "_of_text>" not in name}
        start, end = OPENAI_SPECIAL
        merges = list(self._inner.bpe_ranks)
        made = library.Tokenizer(library.models.BPE(vocabulary, merges, unk_token=end, end_of_word_suffix="</w>"))
        split = library.pre_tokenizers.Split(library.Regex(f"(?i){self._inner.pat.pattern}"), "removed", invert=True)
        as_bytes = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.normalizer = library.normalizers.Sequence(_cleaning(library, self.clean))
        made.pre_tokenizer = library.pre_tokenizers.Sequence([split, as_bytes])
        made.add_special_tokens([start, end])
        made.post_processor = library.processors.TemplateProcessing(
            f"{start} $A {end}", special_tokens=[(name, vocabulary[name]) for name in OPENAI_SPECIAL]
        )
        return made


class TransformersTokenizer(Tokenizer):
    """Tokenizer of the transformers library, loaded from the files in a folder, with the text cleaning of open_clip.

    Other arguments are open_clip's: the cleaning `canonicalize` removes capitals and punctuation (SigLIP),
    `strip_sep_token` the token that separates sentences (CLIPA), and `language` marks captions (NLLB: `zho_Hans`).
    """

    def __init__(
        self,
        folder: Path,
        context_length: int,
        clean: str = "whitespace",
        strip_sep_token: bool = False,
        language: str | None = None,
    ) -> None:
        optional("transformers", "encoders", f"the tokenizer in {folder}")
        try:
            made = HFTokenizer(
                str(folder), context_length, clean, strip_sep_token, language=language, local_files_only=True
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{folder} cannot be read as a tokenizer of transformers: {reason}") from error
        super().__init__(made.tokenizer, context_length)
        self._clean = made.clean_fn
        self._cleaning = clean
        self._dropped = self._inner.sep_token_id if strip_sep_token else None
        self.blank_end = int(strip_sep_token)
        self.pad_id = 0 if strip_sep_token else int(self._inner.pad_token_id or 0)
        backend = getattr(self._inner, "backend_tokenizer", None)
        # Read before any caption, because the rules of a fast tokenizer include how the last one was truncated.
        rules = json.dumps(sorted(self._inner.get_vocab().items())) if backend is None else backend.to_str()
        digest = hashlib.sha256(rules.encode()).hexdigest()[:12]
        switches = f"{clean}{', no separator' * strip_sep_token}{f', {language}' if language else ''}"
        self.description = f"{type(self._inner).__name__} {digest}, {switches}"

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
    def _rules(self, library: Any) -> Any:
        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is None or self._dropped is not None:
            return super()._rules(library)
        made = library.Tokenizer.from_str(backend.to_str())
        own = [] if made.normalizer is None else [made.normalizer]
        made.normalizer = library.normalizers.Sequence([*_cleaning(library, self._cleaning), *own])
        return made


def build_tokenizer(text: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer for open_clip's `text_cfg`, whose `hf_tokenizer_name` is a local folder."""
    options, context_length = dict(text.get("tokenizer_kwargs") or {}), int(text.get("context_length", 77))
    if not text.get("hf_tokenizer_name"):
        return ClipTokenizer(context_length, options.pop("clean", "lower"))
    if text.get("tokenizer_mode"):
        raise UserError(f"open_clip's tokenizer mode {text['tokenizer_mode']!r} is not supported")
    return TransformersTokenizer(Path(text["hf_tokenizer_name"]), context_length, **options)
