"""Parity cases by kind of file; `--cases FOLDER` runs the cases of a folder, of every kind, instead of the suite's own.

The suite's own cases are in tests/parity_cases. The environment variable TVR_PARITY_CASES names a folder with further
ones, of which the suite runs those about training and inputs.
"""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file

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


def pytest_configure(config):
    folder = config.getoption("cases", None)
    if folder is not None and not files_of(folder):
        problem = "contains no case" if folder.exists() else "no such folder"
        raise pytest.UsageError(f"--cases {folder}: {problem}")


def kind_of(path):
    return next((kind for kind, pattern in KINDS.items() if path.match(pattern)), None)


def files_of(folder):
    """Return the cases in a folder and its subfolders, or the one that is named itself."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    return [path for path in files if kind_of(path)]


def cases(config):
    """Return (folder, file) of every case to run."""
    given = config.getoption("cases", None)
    if given is not None:
        return [(given, path) for path in files_of(given)]
    found = [(OWN, path) for path in files_of(OWN)]
    further = os.environ.get("TVR_PARITY_CASES")
    if further:
        names = {path.name for _, path in found}
        paths = [path for path in files_of(Path(further)) if kind_of(path) != "case_path"]
        found += [(Path(further), path) for path in paths if path.name not in names]
    return found


def pytest_generate_tests(metafunc):
    given = metafunc.config.getoption("cases", None) is not None
    for kind in KINDS.keys() & set(metafunc.fixturenames):
        found = [
            pytest.param(
                path,
                id=str(path.relative_to(folder) if path != folder else path.name).removesuffix(".safetensors"),
                marks=pytest.mark.slow if not given and path.name.startswith(LONG) else (),
            )
            for folder, path in cases(metafunc.config)
            if kind_of(path) == kind
        ]
        metafunc.parametrize(kind, found)


def pytest_collection_modifyitems(config, items):
    """With --cases nothing else runs."""
    if config.getoption("cases", None):
        others = [item for item in items if not KINDS.keys() & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture
def write_case(tmp_path):
    """Write tensors as a case of a method and return its path."""

    def write(tensors, method="clip4clip", name="case", **config):
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path, {"method": method, "config": json.dumps(config)})
        return path

    return write
