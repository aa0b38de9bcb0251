"""Fixtures of the whole suite."""

import gc
import os
import resource
import shutil
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from browser import open_browser
from child_processes import end
from filelock import FileLock
from small_run import small_run

# More threads than cores slow down small tensors; the variable is for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import tvr_lightning  # noqa: F401  declares operators that a CUDA build of torchvision needs with a CPU build of torch
from tvr_lightning import progress

torch.set_num_threads(1)
# A shell that starts the suite in the background makes it ignore SIGINT, as would all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Keep the cache that mteb creates when it is imported out of the home folder, which may be read-only."""
    folder = tempfile.TemporaryDirectory()
    os.environ.setdefault("MTEB_CACHE", folder.name)
    config.add_cleanup(folder.cleanup)
    gc.disable()  # until the tests are collected


def pytest_collection_finish():
    """Keep the garbage collector from visiting all imported modules in every test, and let it run less often."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """End the limit of `limit_files` before pytest writes the result, maybe to a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        return (yield)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="session", autouse=True)
def user_state(tmp_path_factory):
    """A separate state directory, so that indexes of tests are not remembered for the user."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("state")
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def quiet_progress():
    """Print progress only in tests that ask for it, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "SECONDS", 3600.0)
        yield


@pytest.fixture
def ended():
    """Take processes of `subprocess` or `multiprocessing` and kill each after the test, whether it passed or failed."""
    with ExitStack() as stack:

        def take(process):
            stack.callback(end, process)
            return process

        yield take


@pytest.fixture
def limit_files():
    """Limit the size of the files that this process writes, as a full disk does; without a size, end the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    return lambda size=soft: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """One browser for all pages of a file of tests, which open their own address in it."""
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="session")
def test_data():
    """Folder of third-party annotations and clips, named by TVR_TEST_DATA; the test is skipped without it."""
    root = os.environ.get("TVR_TEST_DATA")
    if not root:
        pytest.skip("TVR_TEST_DATA is not set")
    path = Path(root)
    assert path.is_dir(), f"TVR_TEST_DATA names {path}, which is not a folder"
    return path


@pytest.fixture(scope="session")
def parity_cases():
    """Folder of the small random cases that the authors' code computed."""
    return Path(__file__).parent / "parity_cases"


@pytest.fixture(scope="session")
def built_once(tmp_path_factory):
    """Fill a folder by its name, once for all test processes. Tests must not change it; they work on copies."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name, build):
        path, done = base / "built" / name, base / "built" / f"{name}.done"
        path.parent.mkdir(exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not done.exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                build(path)
                done.touch()
        return path

    return folder


@pytest.fixture(scope="session")
def synthetic(built_once):
    """Parent folder of a synthetic dataset, by its layout and number of videos: `synthetic("didemo")`, read-only.

    MSR-VTT of 16 videos has 12 to train on (2 of them for validation) and 4 to test on.
    """
    from tvr_lightning.synthetic import synthesize

    def root(layout, videos=16):
        options = {"videos": videos, "seed": 0, "workers": 1, "progress": False}
        return built_once(f"{layout}-{videos}", lambda path: synthesize(layout, path, **options))

    return root


@pytest.fixture(scope="session")
def msrvtt(synthetic):
    """Parent folder of the synthetic MSR-VTT of 16 videos, read-only."""
    return synthetic("msrvtt")


@pytest.fixture
def own_data(msrvtt, tmp_path):
    """Parent folder of a copy of the synthetic MSR-VTT of 16 videos, which a test may change."""
    return shutil.copytree(msrvtt, tmp_path / "data")


@pytest.fixture(scope="session")
def finished_run(built_once, msrvtt):
    """Folder of a finished fit of CLIP4Clip with the options of `small_run.small_run`, read-only."""
    from tvr_lightning.cli import main

    def fit(path):
        assert main(["fit", *small_run(msrvtt, path)]) == 0

    return built_once("finished", fit) / "clip4clip-msrvtt" / "version_0"
