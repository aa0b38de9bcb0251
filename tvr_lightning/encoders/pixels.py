"""What an image tower's weights expect of its pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

from tvr_lightning.media.preparation import Interpolation, ResizeMode

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class PixelPreparation:
    """How the frames were prepared that weights were trained on; by default as OpenAI's CLIP.

    Attributes:
        mean, std: of the pixels in [0, 1], per RGB channel.
        interpolation, resize_mode: as for `Preparation`.
    """

    mean: Colour = OPENAI_DATASET_MEAN
    std: Colour = OPENAI_DATASET_STD
    interpolation: Interpolation = "bicubic"
    resize_mode: ResizeMode = "shortest"

    @classmethod
    def of(cls, settings: Mapping[str, Any], source: str) -> PixelPreparation:
        """Read the settings that open_clip keeps for a tag, or in a folder's `preprocess_cfg`.

        Args:
            settings: by open_clip's names; what is absent is as open_clip presumes it, CLIP's.
            source: of the settings, for the error.

        Raises:
            ValueError: a setting is of a kind that this package does not do; says which.
        """
        known = {name: settings[name] for name in ("interpolation", "resize_mode") if settings.get(name)}
        for name, kind in (("interpolation", Interpolation), ("resize_mode", ResizeMode)):
            if known.get(name, get_args(kind)[0]) not in get_args(kind):
                raise ValueError(
                    f"{source} preprocesses frames with {name} {known[name]!r}, which is not supported. Supported: "
                    + ", ".join(get_args(kind))
                )
        if settings.get("fill_color") or settings.get("mode", "RGB") != "RGB":
            raise ValueError(
                f"{source} preprocesses frames with colored borders or in another mode than RGB, which is not supported"
            )
        for name in ("mean", "std"):
            if settings.get(name):
                known[name] = tuple(float(value) for value in settings[name])
                if len(known[name]) != 3:
                    raise ValueError(f"{source} has a {name} of {len(known[name])} channels; expected RGB")
        return cls(**known)
