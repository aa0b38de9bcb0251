"""What the whole suite shares."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from child_processes import end

# Oversubscribed cores make small tensors slower, not faster; the variable is for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import tvr_lightning  # noqa: F401  declares the operators that a CPU torch beside a CUDA-built torchvision lacks
from tvr_lightning import progress

torch.set_num_threads(1)
# A shell that starts the suite in the background makes it ignore SIGINT, as would all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
Process = TypeVar("Process")


@pytest.fixture(scope="session", autouse=True)
def user_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory of the suite's own: what tests index is not remembered for the user who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("state")
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def unhurried() -> Iterator[None]:
    """How far work is, is said in tests that ask for it, not where a busy machine takes longer than ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "SECONDS", 3600.0)
        yield


@pytest.fixture
def ended() -> Iterator[Callable[[Process], Process]]:
    """Take processes of `subprocess` or `multiprocessing` and kill each after the test, whether it passed or failed."""
    with ExitStack() as stack:

        def take(process: Process) -> Process:
            stack.callback(end, process)
            return process

        yield take


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of third-party annotations and clips, named by TVR_TEST_DATA; the test is skipped without it."""
    root = os.environ.get("TVR_TEST_DATA")
    if not root:
        pytest.skip("TVR_TEST_DATA is not set")
    path = Path(root)
    assert path.is_dir(), f"TVR_TEST_DATA names {path}, which is no folder"
    return path


@pytest.fixture(scope="session")
def parity_cases() -> Path:
    """Folder of the small random cases that the authors' code computed."""
    return Path(__file__).parent / "parity_cases"
