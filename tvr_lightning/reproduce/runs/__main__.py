"""The process of a further device of a run, which ends with the process of the first one."""

import os
import sys
import threading
import time
from pathlib import Path

from tvr_lightning.reproduce.runs.execute import run_task


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.exit(run_task(Path(sys.argv[1])))
