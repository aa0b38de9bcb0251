"""Pixel preprocessing of image towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

from tvr_lightning.errors import UserError
from tvr_lightning.media.preparation import Interpolation, ResizeMode

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class PixelPreparation:
    """Frame preprocessing that weights were trained with; by default that of OpenAI's CLIP.

    Attributes:
        mean: Mean of the pixels in [0, 1], per RGB channel.
        std: Standard deviation of the pixels in [0, 1], per RGB channel.
        interpolation: Same as for `Preparation`.
        resize_mode: Same as for `Preparation`.
    """

    mean: Colour = OPENAI_DATASET_MEAN
    std: Colour = OPENAI_DATASET_STD
    interpolation: Interpolation = "bicubic"
    resize_mode: ResizeMode = "shortest"

    @classmethod
    def of(cls, settings: Mapping[str, Any], source: str) -> PixelPreparation:
        """Return the settings of an open_clip tag, or of the `preprocess_cfg` in a folder.

        Args:
            settings: Settings with open_clip's names; missing ones default to CLIP's, as in open_clip.
            source: Source of the settings, for errors about those that are not supported.
        """
        known = {field.name: settings[field.name] for field in fields(cls) if settings.get(field.name)}
        for name, kind in (("interpolation", Interpolation), ("resize_mode", ResizeMode)):
            if name in known and known[name] not in get_args(kind):
                raise UserError(
                    f"{source} preprocesses frames with {name} {known[name]!r}, which is not supported. Supported: "
                    + ", ".join(get_args(kind))
                )
        if settings.get("fill_color") or settings.get("mode", "RGB") != "RGB":
            raise UserError(
                f"{source} preprocesses frames with colored borders or in another mode than RGB, which is not supported"
            )
        for name in known.keys() & {"mean", "std"}:
            known[name] = tuple(map(float, known[name]))
            if len(known[name]) != 3:
                raise UserError(f"{source} has a {name} of {len(known[name])} channels; expected RGB")
        return cls(**known)
