"""One process holds a lock at a time; a dead one holds none, and a disk without locks is said and stops nobody."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from tvr_lightning.errors import UserError
from tvr_lightning.files import held

FORK = multiprocessing.get_context("fork")


def hold(file: Path) -> None:
    with held(file, UserError("busy"), ""):
        file.with_name("child").touch()
        time.sleep(600)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, ended):
    file = tmp_path / "lock"
    holder = ended(FORK.Process(target=hold, args=(file,)))
    holder.start()
    while not (tmp_path / "child").exists():
        assert holder.is_alive()
        time.sleep(0.01)
    with pytest.raises(UserError, match="busy"), held(file, UserError("busy"), ""):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    for _ in range(2):
        with held(file, UserError("busy"), ""):
            pass


def wait() -> None:
    time.sleep(600)


def test_what_a_killed_holder_started_does_not_hold_the_lock(tmp_path, ended):
    with held(tmp_path / "lock", UserError("busy"), ""):
        child = ended(FORK.Process(target=wait))
        child.start()
    with held(tmp_path / "lock", UserError("busy"), ""):
        assert child.is_alive()


@pytest.mark.parametrize("answer", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_on_a_disk_without_locks_it_is_said_and_work_goes_on(tmp_path, monkeypatch, answer):
    fcntl = pytest.importorskip("fcntl")

    def refuse(descriptor, operation):
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said, reached = [], 0
    for _ in range(2):  # nothing stays behind that a second one would take for a lock
        with held(tmp_path / "lock", UserError("busy"), "start no second one", said.append):
            reached += 1
    assert reached == 2
    expected = (
        f"{tmp_path} is on a disk without file locks ([Errno {answer}] {os.strerror(answer)}): start no second one"
    )
    assert said == [expected, expected]
    with pytest.warns(UserWarning, match="without file locks"), held(tmp_path / "lock", UserError("busy"), ""):
        pass


def test_what_goes_wrong_under_the_lock_is_not_taken_for_its_own_trouble(tmp_path):
    with pytest.raises(OSError, match="no locks here"), held(tmp_path / "lock", UserError("busy"), ""):
        raise OSError(errno.ENOLCK, "no locks here")
    with held(tmp_path / "lock", UserError("busy"), ""):
        pass


def test_a_lock_file_that_cannot_be_opened_is_no_missing_lock(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"lock"), held(tmp_path / "lock", UserError("busy"), ""):
        pass
    assert not (tmp_path / "elsewhere").exists()
