"""Commands that run a recipe or use a trained method."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from tvr_lightning.cli.options import Checkpoint, Config, File, NewFile, NewFolder, Trust
from tvr_lightning.config.recipe_files import RECIPES, refuse_options
from tvr_lightning.option_types import Count, Range
from tvr_lightning.runs.log import loading

ReleasedMethod = Literal["clip4clip", "drl", "gaid", "gare", "tcmgc", "tmass", "ucofia", "xclip", "xpool"]
OVERLAYS = ("fixture", "demo", "features", "heads")
EPILOG = """\
recipes:
{recipes}

common options of recipes:
  --trainer.max_epochs N           number of training epochs
  --trainer.devices N              number of GPUs; hardware/* also sets precision and strategy
  --data.init_args.root FOLDER     parent folder of the datasets; $TVR_DATA by default
  --data.init_args.batch_size N    text-video pairs per optimizer step, over all devices
  --data.init_args.num_workers N   worker processes that decode videos
  --seed_everything N              seed of the run; 0 by default
  --checkpoints.resume true        resume the newest run of this method and dataset, or start one
  --results.directory FOLDER       parent folder of the results; by default runs, or the checkpoint's run

"""


def _run_of(command: Literal["fit", "validate", "test", "predict"], summary: str) -> Callable[..., None]:
    def run(
        config: Config = [],
        ckpt_path: Annotated[Checkpoint, "FILE", "checkpoint to evaluate; recipes override its options"] = None,
        override: Annotated[bool, "score with the given options even if the training had others"] = False,
        trust: Trust = [],
        overrides: Sequence[str] = (),
    ) -> None:
        with loading(command):
            from tvr_lightning.config.recipe import Recipe
            from tvr_lightning.runs.run import Run
        recipe = Recipe.parse(config, overrides, None if command == "fit" else ckpt_path, trust, override)
        words = [command, *(f"--config={name}" for name in config), *overrides]
        words += [f"--ckpt_path={ckpt_path}"] if ckpt_path else []
        Run(command, recipe, str(ckpt_path) if ckpt_path else None, words).start()

    run.__doc__ = summary
    return run


validate = _run_of("validate", "Evaluate a checkpoint on the validation split.")
run_test = _run_of("test", "Evaluate a checkpoint on the test split, and print and save the results.")
predict = _run_of("predict", "Write the top-ranked videos of every test text to a parquet file.")


def fit(
    config: Config = [],
    ckpt_path: Annotated[Checkpoint, "FILE", "checkpoint of an interrupted run to resume"] = None,
    estimate: Annotated[bool, "print the memory, disk space, and time of the run, without training"] = False,
    overrides: Sequence[str] = (),
) -> None:
    """Train a method, test it, and print and save the results."""
    if not estimate:
        _run_of("fit", "")(config, ckpt_path, overrides=overrides)
        return
    refuse_options({"ckpt_path": ckpt_path}, "cannot be used with --estimate, which estimates a whole run.")
    with loading("fit"):
        from tvr_lightning.config.recipe import Recipe
        from tvr_lightning.reproduce.profile.estimate import estimate as measure
    print(measure(Recipe.parse(config, overrides)).text)


def recipes_and_options() -> str:
    """Return the end of the help of fit, validate, test, and predict: recipes and common options."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    groups = {
        "methods": [name for name in names if name not in OVERLAYS and not name.startswith("fixture-")],
        "overlays": OVERLAYS,
    }
    for folder in ("data", "backbone", "tuning", "hardware", "variants"):
        groups[folder] = [f"{folder}/{path.stem}" for path in sorted((RECIPES / folder).glob("*.yaml"))]
    lines = []
    for title, found in groups.items():
        listed = f"  {title:<10}{' '.join(found)}"
        lines += textwrap.wrap(listed, 118, subsequent_indent=" " * 12, break_on_hyphens=False)
    return EPILOG.format(recipes="\n".join(lines))


def audit(
    config: Config = [],
    ckpt_path: Annotated[File | None, "checkpoint to audit; the recipe's starting weights by default"] = None,
    videos: Annotated[int, Range(at_least=4), "number of test videos to audit, with their texts"] = 64,
    seed: Annotated[int | None, "seed for selecting and ordering videos and texts; a new one by default"] = None,
    trust: Trust = [],
    overrides: Sequence[str] = (),
) -> int:
    """Check empirically that no ground truth leaks into the scores; the exit status is 1 if any does."""
    with loading("audit"):
        from tvr_lightning.audit.run import audit_method, report_audit
        from tvr_lightning.config.recipe import Recipe
        from tvr_lightning.progress import shown

        recipe = Recipe.parse(config, overrides, ckpt_path, trust)
        recipe.check()
        built = recipe.build()
    if recipe.trained is not None:
        built.model.load_weights(recipe.trained.saved)
    with shown(f"audit: scoring the same pairs of up to {videos} videos repeatedly"):
        found = audit_method(built.model, built.data, videos, seed)
    return report_audit(built.model, found)


def convert(
    source: Annotated[File, "authors' file (pytorch_model.bin.*, .pth, .pt, or .safetensors)"],
    out: Annotated[NewFile, "output file"],
    /,
    words: Annotated[Count | None, "number of text positions, including SOT and EOT"] = None,
    frames: Annotated[Count | None, "number of frames per video"] = None,
    method: Annotated[ReleasedMethod | None, "method of the checkpoint; detected by default"] = None,
    openai_clip: Annotated[File | None, "OpenAI's CLIP weights, for UCoFiA"] = None,
) -> None:
    """Convert an authors' checkpoint into one that `tvr test --ckpt_path` loads.

    Words and frames are those of the released evaluation by default. UCoFiA's uses OpenAI's CLIP weights in the
    attention of vision blocks 10 and 11.
    """
    from tvr_lightning.progress import shown

    with shown(f"convert: reading {source.name}"):
        from tvr_lightning.authors.convert import convert as convert_checkpoint

        _, lines = convert_checkpoint(source, out, words, frames, method, openai_clip)
    print("\n".join(lines))


def push(
    checkpoint: Annotated[File, "checkpoint of `tvr fit`"],
    name: Annotated[str, "user/name of the repository; an existing one gets a new revision"],
    /,
    results: Annotated[File | None, "results.json of these weights; that in the run's folder by default"] = None,
    private: Annotated[bool, "hide a new repository from others"] = False,
    license: Annotated[str | None, "identifier of the license for the model card, such as mit"] = None,
    trust: Trust = [],
) -> None:
    """Publish a trained method on the Hugging Face Hub; log in with `hf auth login` or set HF_TOKEN."""
    with loading("push"):
        from tvr_lightning.api.hub import push_to_hub
    print(push_to_hub(checkpoint, name, results=results, private=private, license=license, trust=trust))


def export(
    source: Annotated[str, "checkpoint, hf:user/name, or open_clip architecture, such as ViT-B-32"],
    out: Annotated[NewFolder, "new folder"],
    /,
    weights: Annotated[str | None, "weights of the architecture: a file, a tag, or none; openai by default"] = None,
    frames: Annotated[Count | None, "number of frames per video of the architecture; 12 by default"] = None,
    trust: Trust = [],
) -> None:
    """Export a method's encoders and head to ONNX, compare them with torch, and add an example that needs no torch."""
    from tvr_lightning.progress import shown

    with shown("export: tracing and comparing with torch"):
        from tvr_lightning.api.export import export as export_method

        lines = export_method(source, out, weights=weights, frames=frames, trust=trust)
    print(*lines, f"Wrote {out}", sep="\n")


def schema() -> None:
    """Print the JSON schema of recipes, with which editors complete and check them."""
    import json

    with loading("schema"):
        from tvr_lightning.config.recipe import recipe_schema

        found = recipe_schema()
    print(json.dumps(found, indent=2))
