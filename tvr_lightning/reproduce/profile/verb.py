"""`tvr profile`: parameters, FLOPs, time and memory of a recipe's method, written to a card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.errors import MissingAssetError
from tvr_lightning.evaluation.results import environment
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.places import NewFolder
from tvr_lightning.progress import shown
from tvr_lightning.ranges import Count, Range
from tvr_lightning.recipe import RecipeCLI, plain
from tvr_lightning.recipe_files import RecipeError
from tvr_lightning.reproduce.profile.card import ProfileCard, write_profile
from tvr_lightning.reproduce.profile.costs import STAGES, Precision, Workload, measure_costs


class _WithoutData(RecipeCLI):
    """A recipe's method; its data module is built for its sizes, but no dataset has to be there."""

    random_weights = False

    def before_instantiate_classes(self) -> None:
        """Check the precision, and that the encoders' weights are present unless random ones will do.

        Raises:
            RecipeError: they are, and need not be there; says how.
        """
        self.check_trainer()
        if self.random_weights:
            _without_weights(self.options.model)
        try:
            self.check_present([])
        except MissingAssetError as error:
            raise RecipeError(
                f"The recipe's weights are missing. Trained weights are not required; add --random_weights. {error}"
            ) from error


class _OfRandomWeights(_WithoutData):
    """The same with random weights in every encoder that takes some."""

    random_weights = True


def _without_weights(section: Namespace) -> None:
    """Set `weights` to none in a class's options, and in those of the classes among them."""
    options = section.get("init_args") or Namespace()
    if "weights" in options:
        options.weights = None
    for value in vars(options).values():
        if isinstance(value, Namespace) and "class_path" in value:
            _without_weights(value)


def run_profile(
    config: list[str],
    out: NewFolder = Path("runs/reproduced"),
    batch_size: Annotated[int, Range(at_least=2)] = 16,
    queries: Count = 1000,
    repeats: Count = 3,
    random_weights: bool = False,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Measure the parameters, memory, and time of a method on random inputs of the recipe's sizes, without a dataset.

    Milliseconds per video: encoding one video (its share of a batch, media in memory) and scoring all queries against
    it. Times and memory are those of the recipe's precision and gradient cache.

    Args:
        config: recipe files; later ones override earlier ones.
        out: parent folder of profiles/; by default that of `tvr reproduce`, whose report then shows the profiles.
        batch_size: number of matching pairs per batch.
        queries: number of texts that each video is scored against.
        repeats: number of time measurements, of which the median is reported.
        random_weights: build all encoders with random weights instead of the recipe's; the cost is the same.
        device: device to measure on; a GPU by default if available.
        overrides: options that override the recipes, such as `--data.init_args.batch_size=32`.
    """
    arguments = [item for path in config for item in ("--config", path)]
    cli_class = _OfRandomWeights if random_weights else _WithoutData
    # No weights follow: for encoders that a recipe leaves to its method.
    with weights_follow() if random_weights else nullcontext():
        cli = cli_class(args=[*arguments, *overrides], run=False)
    module = cli.model
    if not isinstance(module, RetrievalModule):
        raise RecipeError(f"tvr profile measures retrieval methods, not {type(module).__name__}")
    options = plain(cli.parser, cli.config)["model"]
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    workload = Workload(batch_size, queries, repeats)
    plugin = cli.trainer.precision_plugin
    plugin.convert_module(module.to(chosen))
    with shown("profile: measuring"):
        card = profile_card(module, options, workload, str(cli.trainer.precision), plugin.forward_context)
    _print(card)
    Console(highlight=False, soft_wrap=True).print(f"Wrote {write_profile(card, out / 'profiles')}", markup=False)
    return 0


def profile_card(
    module: RetrievalModule,
    options: dict[str, Any],
    workload: Workload,
    precision: str = "32-true",
    context: Precision = nullcontext,
) -> ProfileCard:
    """Measure a method and return its card.

    Args:
        module: on the device where it is to be measured.
        options: of the method, for the card.
        workload: batch, queries, repeats.
        precision: name of what `context` sets.
        context: that forward passes run in.
    """
    encoder = " ".join(filter(None, (type(module.encoder).__name__, getattr(module.encoder, "name", None))))
    return ProfileCard(
        name=re.sub(r"[^a-z0-9]+", "-", f"{module.title} {encoder}".lower()).strip("-"),
        method=module.title,
        encoder=encoder,
        options=options,
        batch=workload.batch,
        queries=workload.queries,
        frames=module.frames,
        words=module.words,
        image_size=module.image_size,
        repeats=workload.repeats,
        precision=precision,
        costs=measure_costs(module, workload, context),
        environment={**environment(), "device": str(module.device)},
    )


def _print(card: ProfileCard) -> None:
    costs = card.costs
    table = Table(
        title=f"{card.method}, {card.encoder}, batch {card.batch}, {card.precision}, {card.environment['device']}"
    )
    table.add_column("what")
    table.add_column("measured", justify="right")
    rows = [("parameters", f"{costs.parameters / 1e6:.2f} M"), ("trained", f"{costs.trainable / 1e6:.2f} M")]
    rows += [(f"  {name}", f"{count / 1e6:.3f} M") for name, count in costs.parameters_by_module.items()]
    rows += [(f"FLOPs, {words}", f"{costs.flops_by_stage[name] / 1e9:.3f} G") for name, words in STAGES.items()]
    rows += [
        ("training step", f"{costs.training_step_ms:.1f} ms"),
        ("encoding a text", f"{costs.encode_text_ms:.2f} ms"),
        ("encoding a video", f"{costs.encode_video_ms:.2f} ms"),
        (f"scoring a video for {card.queries} queries", f"{costs.score_ms_per_video:.2f} ms"),
        ("per video (encoding and scoring)", f"{costs.ms_per_video:.2f} ms"),
        ("peak memory, inference", _mib(costs.peak_inference_mib)),
        ("peak memory, training", _mib(costs.peak_training_mib)),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _mib(value: float | None) -> str:
    return "not available" if value is None else f"{value:.0f} MiB"
