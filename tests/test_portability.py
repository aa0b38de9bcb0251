"""The package loads on systems other than Unix."""

import builtins
import importlib
import pkgutil
import sys

from child_processes import fork

import tvr_lightning

UNIX = {"crypt", "fcntl", "grp", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}


def load_without_unix():
    """Import every module of the package again, as if Python had none of the modules for Unix."""
    for name in [name for name in sys.modules if name.startswith("tvr_lightning.")]:
        del sys.modules[name]
    real = builtins.__import__

    def without_unix(name, globals=None, *rest, **named):
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


def test_every_module_loads_without_modules_for_unix(ended):
    process = ended(fork(load_without_unix))
    process.join(300)
    assert process.exitcode == 0
