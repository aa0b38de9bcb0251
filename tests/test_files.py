"""Locks of files, and journals to which processes append lines."""

import errno
import os
import signal
import time

import pytest
from child_processes import fork, until

from tvr_lightning.errors import UserError
from tvr_lightning.files import Journal, file_lock, read_journal


def hold(file):
    with file_lock(file, "it"):
        file.with_name("child").touch()
        time.sleep(600)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, ended):
    file = tmp_path / "lock"
    holder = ended(fork(hold, file))
    until((tmp_path / "child").exists)
    with pytest.raises(UserError, match="Another process is writing it"), file_lock(file, "it"):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    for _ in range(2):
        with file_lock(file, "it"):
            pass


def test_a_child_process_does_not_keep_the_lock(tmp_path, ended):
    with file_lock(tmp_path / "lock", "it"):
        child = ended(fork(time.sleep, 600))
    with file_lock(tmp_path / "lock", "it"):
        assert child.is_alive()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_disk_without_locks_is_reported_and_used(tmp_path, monkeypatch, code):
    def refuse(descriptor, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    reports = []
    for _ in range(2):  # nothing remains that the second one would take for a lock
        with file_lock(tmp_path / "lock", "it", report=reports.append):
            pass
    reason = f"is on a disk without file locks ([Errno {code}] {os.strerror(code)})"
    assert reports == [f"{tmp_path} {reason}: do not start a second process for it"] * 2
    with pytest.warns(UserWarning, match="without file locks"), file_lock(tmp_path / "lock", "it"):
        pass


def test_other_errors_are_not_mistaken_for_missing_locks(tmp_path):
    with pytest.raises(OSError, match="no locks here"), file_lock(tmp_path / "lock", "it"):
        raise OSError(errno.ENOLCK, "no locks here")
    with file_lock(tmp_path / "lock", "it"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"), file_lock(tmp_path / "link", "it"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def write(file, count=10**9):
    with Journal.open(file, {"model": "a"}, "it") as journal:
        for number in range(len(journal.entries), count):
            journal.append({"number": number, "text": "x" * 1000})


def test_a_killed_process_loses_at_most_the_entry_that_it_was_writing(tmp_path, ended):
    file = tmp_path / "new" / "journal"
    for _ in range(2):
        before = len(read_journal(file)[0])
        writer = ended(fork(write, file))
        until(lambda before=before: len(read_journal(file)[0]) >= before + 5)
        with pytest.raises(UserError, match="Another process is writing it"):
            write(file)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    lines, _ = read_journal(file)
    assert lines[0] == {"model": "a"}
    assert [line["number"] for line in lines[1:]] == list(range(len(lines) - 1))


def test_a_journal_continues_after_its_last_complete_line(tmp_path):
    file = tmp_path / "journal"
    write(file, 2)
    content = file.read_bytes()
    for cut in range(1, 12):
        file.write_bytes(content[:-cut])
        write(file, 2)
        assert file.read_bytes() == content


def test_an_existing_journal_keeps_its_header_and_can_be_rewritten(tmp_path):
    file = tmp_path / "journal"
    write(file, 3)
    with Journal.open(file, {"model": "b"}, "it") as journal:
        assert journal.header == {"model": "a"}
        journal.append("last")
        journal.rewrite(journal.entries[2:])
    assert read_journal(file)[0] == [{"model": "a"}, {"number": 2, "text": "x" * 1000}, "last"]


def test_a_damaged_journal_and_a_full_disk_are_explained(tmp_path):
    file = tmp_path / "journal"
    write(file, 3)
    file.write_bytes(file.read_bytes().replace(b'"model"', b"model"))
    with pytest.raises(UserError, match=r"journal is damaged .*Delete it"):
        write(file)
    (tmp_path / "file").touch()
    message = r"cannot be written: .*Earlier entries are kept\. To resume, free disk space, or check its perm"
    with pytest.raises(UserError, match=message):
        write(tmp_path / "file" / "journal")
