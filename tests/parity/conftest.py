"""Parity cases by kind of file; `--cases FOLDER` runs the cases of a folder, of every kind, instead of the suite's own.

The suite's own cases are in tests/parity_cases. The environment variable TVR_PARITY_CASES names a folder with further
ones, of which the suite runs those about training and inputs.
"""

import os
from pathlib import Path

import pytest

OWN = Path(__file__).parents[1] / "parity_cases"
LONG = "ncl"  # 20,000 Sinkhorn iterations each
KINDS = {
    "optimizer_case": "optimizer_*.safetensors",
    "steps_case": "training_steps_*.safetensors",
    "groups_case": "training_groups*.json",
    "padded_case": "padded_frames_*.safetensors",
    "saved_case": "*_as_saved.safetensors",
    "frames_case": "inputs_frames*.json",
    "pixels_case": "inputs_pixels*.json",
    "tokens_case": "inputs_tokens*.json",
    "sets_case": "inputs_sets*.json",
    "widths_case": "odd_widths/expected*.json",
    "case_path": "*.safetensors",
}
"""File pattern of each kind of case, by the name of the test argument that receives the file; the first match wins."""


def pytest_addoption(parser):
    parser.addoption("--cases", type=Path, metavar="FOLDER", help="run only the parity cases in this folder")


def kind_of(path):
    return next((kind for kind, pattern in KINDS.items() if path.match(pattern)), None)


def cases_in(folder):
    """Return the cases in a folder and its subfolders, or the one that is named itself, by their names."""
    root, files = (folder.parent, [folder]) if folder.is_file() else (folder, sorted(folder.rglob("*")))
    return {str(path.relative_to(root)): path for path in files if kind_of(path)}


def cases(config):
    """Return the cases to run by their names."""
    given, further = config.getoption("cases", None), os.environ.get("TVR_PARITY_CASES")
    if given is not None:
        return cases_in(given)
    if further and not Path(further).is_dir():
        raise pytest.UsageError(f"TVR_PARITY_CASES names {further}, which is not a folder")
    others = cases_in(Path(further)) if further else {}
    return {name: path for name, path in others.items() if kind_of(path) != "case_path"} | cases_in(OWN)


def pytest_configure(config):
    if not cases(config):
        raise pytest.UsageError(f"--cases {config.getoption('cases')} contains no case")


def pytest_generate_tests(metafunc):
    given = metafunc.config.getoption("cases", None)
    for kind in KINDS.keys() & set(metafunc.fixturenames):
        found = [
            pytest.param(
                path,
                id=name.removesuffix(".safetensors"),
                marks=pytest.mark.slow if given is None and name.startswith(LONG) else (),
            )
            for name, path in cases(metafunc.config).items()
            if kind_of(path) == kind
        ]
        metafunc.parametrize(kind, found)


def pytest_collection_modifyitems(config, items):
    """With --cases nothing else runs."""
    if config.getoption("cases", None):
        others = [item for item in items if not KINDS.keys() & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
