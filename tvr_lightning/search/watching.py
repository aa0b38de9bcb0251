"""Waiting for changes in folders: new, changed and removed videos, once they are written to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tvr_lightning.search.files import find_videos

Snapshot = tuple[frozenset[tuple[Path, int, int]], tuple[str, ...]]


class Watch:
    """Looks at folders again and again, which works on any file system.

    Args:
        every: seconds between two looks. A file is taken once two looks in a row find it alike.
        tell: is told of folders that cannot be read any more.
        sleep: waits so many seconds.
    """

    def __init__(
        self, every: float = 2.0, tell: Callable[[str], None] = print, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.every, self.tell, self.sleep = every, tell, sleep
        self._done: Snapshot | None = None

    def look(self, roots: Sequence[Path]) -> Snapshot:
        """Return which videos are there in which state, and which folders cannot be read."""
        found = find_videos(roots)
        files = frozenset((file.path, file.size, file.modified) for file in found.files)
        return files, tuple(sorted(found.problems))

    def begin(self, roots: Sequence[Path]) -> None:
        """Note how things are before they are read; what changes from now on is a change."""
        self._done = self.look(roots)

    def wait(self, roots: Sequence[Path]) -> None:
        """Return once something has changed and stands still; folders that vanish are told of, and waited for."""
        done, before = self._done or self.look(roots), None
        while True:
            self.sleep(self.every)
            now = self.look(roots)
            for problem in sorted(set(now[1]) - set(done[1])):
                self.tell(f"{problem}; its videos stay in the index, and it is looked for again")
            done = (done[0], now[1])
            # Of a folder that cannot be read nothing is known; what went with it is no change.
            lost = [Path(problem.partition(": ")[0]) for problem in now[1]]
            there = {path for path, _, _ in now[0]}
            away = {each for each in done[0] if each[0] not in there and _below(each[0], lost)}
            if now[0] != done[0] - away and before == now[0]:
                self._done = (now[0] | away, now[1])
                return
            before = now[0]


def _below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path == folder or folder in path.parents for folder in folders)
