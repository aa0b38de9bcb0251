"""One-screen help of fit, validate, test and predict with the common options; `--help_all` shows all options."""

from __future__ import annotations

import textwrap
from pathlib import Path

_OPTIONS = {
    "--data.init_args.root FOLDER": "parent folder of the datasets; $TVR_DATA by default",
    "--data.init_args.batch_size N": "text-video pairs per optimizer step, over all devices",
    "--data.init_args.num_workers N": "worker processes that decode videos",
    "--trainer.devices N": "number of GPUs; hardware/* also sets precision and strategy",
    "--results.directory FOLDER": "parent folder of the results; by default runs, or the checkpoint's run",
}
_OF_FIT = {
    "--trainer.max_epochs N": "number of training epochs",
    "--estimate": "print the memory, disk space, and time that the run needs, without training",
    "--seed_everything N": "seed of the run; 0 by default",
    "--checkpoints.resume true": "resume the newest run of this method and dataset, or start one",
    "--ckpt_path FILE": "checkpoint of an interrupted run to resume",
}
_OF_OTHERS = {"--ckpt_path FILE": "checkpoint to evaluate; it sets method, data, and options, which recipes override"}
_EXAMPLES = {
    "fit": ["tvr fit --config {recipe}", "tvr fit --config {recipe} --config recipes/fixture.yaml"],
    "test": [
        "tvr test --ckpt_path runs/gare-msrvtt/version_0/checkpoints/last.ckpt",
        "tvr test --config recipes/zero-shot.yaml --config recipes/backbone/pe-core-b.yaml",
    ],
}
_OVERLAYS = ("fixture", "demo", "features", "heads")
_FOLDERS = {"data": "datasets", "backbone": "backbones", "hardware": "hardware", "variants": "variants"}


def lightning_help(verb: str, what: str, recipes: Path) -> str:
    """Return the help of one of Lightning's commands.

    Args:
        verb: Name of the command: fit, validate, test or predict.
        what: Description of the command.
        recipes: Folder of the listed recipes.
    """
    names = sorted(path.stem for path in recipes.glob("*.yaml"))
    methods = [name for name in names if "-" not in name and name not in _OVERLAYS]
    groups: dict[str, list[str]] = {
        "methods": methods,
        "overlays": [name for name in _OVERLAYS if name in names],
    }
    for folder, title in _FOLDERS.items():
        groups[title] = [f"{folder}/{path.stem}" for path in sorted((recipes / folder).glob("*.yaml"))]
    options = {**(_OF_FIT if verb == "fit" else _OF_OTHERS), **_OPTIONS}
    examples = _EXAMPLES.get(verb, [f"tvr {verb} --ckpt_path runs/gare-msrvtt/version_0/checkpoints/last.ckpt"])
    needed = "--config RECIPE [--config RECIPE ...]" if verb == "fit" else "[--ckpt_path FILE] [--config RECIPE ...]"
    lines = [
        f"usage: tvr {verb} {needed} [--OPTION VALUE ...]",
        "",
        f"{what[0].upper()}{what[1:]}.",
        "",
        "recipes (a name or a path; later ones override earlier ones):",
    ]
    for title, found in groups.items():
        shown = textwrap.shorten(" ".join(found), 3 * 100, placeholder=" ...") if found else "none"
        lines += textwrap.wrap(
            shown, 118, initial_indent=f"  {title:<10}", subsequent_indent=" " * 12, break_on_hyphens=False
        )
    lines += ["", "common options:", *(f"  {name:<32} {said}" for name, said in options.items()), ""]
    lines += ["examples:", *(f"  {example.format(recipe='recipes/gare.yaml')}" for example in examples), ""]
    lines.append(
        f"All options: tvr {verb} --help_all. Options of one class: tvr {verb} --model.help GARE, --data.help MSRVTT"
    )
    return "\n".join(lines)
