"""Checks of options and features that several methods share."""

from collections.abc import Sequence
from typing import Any, get_args

from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures


def distinct(option: str, chosen: Sequence[Any], known: Any) -> tuple[Any, ...]:
    """Return the chosen words of a Literal type in its order. Reject none and repetitions."""
    words = get_args(known)
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"{option} is {list(chosen)}; it must contain some of {', '.join(words)}, each once")
    return tuple(word for word in words if word in chosen)


def check_sizes(text: TextFeatures, video: VideoFeatures, words: int, frames: int) -> None:
    """Reject other numbers of words and frames than those that a head's parameters were built for."""
    found = (text.words.shape[1], video.frames.shape[1])
    if found != (words, frames):
        raise UserError(
            f"The method was built for {words} words and {frames} frames, but got {found[0]} words and {found[1]} "
            "frames. Set model.init_args.words and frames, or those of the data."
        )
