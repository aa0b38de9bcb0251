"""The package loads where there is no Unix."""

import subprocess
import sys

PROGRAM = """
import builtins, importlib, pkgutil, signal
import tvr_lightning

UNIX = {"crypt", "fcntl", "grp", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}
real = builtins.__import__

def without_unix(name, globals=None, *rest, **named):
    # Other packages know where they run; this one is told that it is not on a Unix.
    if name in UNIX and (globals or {}).get("__name__", "").startswith("tvr_lightning"):
        raise ImportError(f"no module {name}")
    return real(name, globals, *rest, **named)

builtins.__import__ = without_unix
names = [module.name for module in pkgutil.walk_packages(tvr_lightning.__path__, "tvr_lightning.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 100, names
from tvr_lightning.reproduce.runs.card import peak_memory_mib
assert peak_memory_mib() is None
print("loaded")
"""


def test_every_module_loads_without_those_of_unix():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "loaded\n", done.stderr
