"""`--cases FOLDER` runs the parity cases below a folder instead of the suite's own."""

import json
from pathlib import Path

import pytest
from parity.case import CaseError, find_cases
from parity.restated import Sizes, restated_case
from safetensors.torch import save_file

OWN = Path(__file__).parents[1] / "parity_cases"


def pytest_addoption(parser):
    parser.addoption(
        "--cases", type=Path, metavar="FOLDER", help="run only the parity cases (*.safetensors) below this folder"
    )


def pytest_configure(config):
    try:
        find_cases(folder_of(config))
    except CaseError as error:
        raise pytest.UsageError(f"--cases {error}") from error


LONG = "ncl"  # twenty thousand steps of Sinkhorn each


def folder_of(config):
    return config.getoption("cases", None) or OWN


def pytest_generate_tests(metafunc):
    if "case_path" in metafunc.fixturenames:
        folder = folder_of(metafunc.config)
        paths = find_cases(folder)
        own = folder == OWN
        cases = [
            pytest.param(
                path,
                id=str(path.relative_to(folder) if path != folder else path.name).removesuffix(".safetensors"),
                marks=pytest.mark.slow if own and path.name.startswith(LONG) else (),
            )
            for path in paths
        ]
        metafunc.parametrize("case_path", cases)


def pytest_collection_modifyitems(config, items):
    """With --cases nothing else runs."""
    if config.getoption("cases", None):
        others = [item for item in items if "case_path" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture
def write_case(tmp_path):
    """Write tensors as a case of a method and return its path."""

    def write(tensors, method="clip4clip", name="case", **config):
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, {"method": method, "config": json.dumps(config)})
        return path

    return write


@pytest.fixture
def restate():
    """Compute a case by the plain restatement."""

    def compute(header, **sizes):
        return restated_case(Sizes(**sizes), header)

    return compute
