"""Options of the DataModules that cannot be together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvr_lightning.data.base import TextVideoDataModule


def check_options(data: TextVideoDataModule) -> None:
    """Refuse options that are out of range or contradict each other.

    Raises:
        ValueError: names the options, their values and the fix.
    """
    positive = ("frames", "image_size", "batch_size", "eval_batch_size")
    for name, least in [(name, 1) for name in positive] + [("words", 3), ("num_workers", 0), ("seed", 0)]:
        if getattr(data, name) < least:
            raise ValueError(f"{name} is {getattr(data, name)}; it must be at least {least}")
    if data.holdout < 0:
        raise ValueError(f"holdout is {data.holdout}; give a number of training videos, or 0 for none")
    if data.holdout and data.has_official_validation:
        raise ValueError(
            f"holdout {data.holdout}: {type(data).__name__} with split {data.split!r} has an official validation "
            "split; set holdout to 0 to use it"
        )
    if data.max_train_videos is not None and data.max_train_videos < 1:
        raise ValueError(f"max_train_videos is {data.max_train_videos}; give at least 1, or null for all of them")
    if data.features is not None and (data.augmentation != "none" or data.train_sampling != data.sampling):
        raise ValueError(
            f"features {data.features!r} fixes the frames of every clip, so augmentation {data.augmentation!r} and "
            f"train_sampling {data.train_sampling!r} cannot apply; set augmentation to none and train_sampling to "
            "null (recipes/features.yaml does), or unset features"
        )
    if data.sampling == "segment-random":
        raise ValueError(
            "sampling 'segment-random' would make evaluation random; set it as train_sampling and keep a "
            "deterministic sampling such as 'segment-centres' for evaluation"
        )
