"""Make `import torchvision` work where a CPU torch lies beside a CUDA-built torchvision.

Such a torchvision cannot load its compiled operators, and its import then fails with "operator torchvision::nms does
not exist", although this project (through torchmetrics and open_clip) uses its image transforms only. Declaring the
two operator schemas that the import looks up is enough. Where torchvision is healthy or absent, nothing is done.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: Any = None  # the declarations live as long as this object


class TorchvisionFinder(MetaPathFinder):
    """Finds no module, but declares what torchvision lacks when it is about to be imported, by whomever.

    So `import tvr_lightning` imports neither torch nor torchvision, and takes no time.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return None, so that the usual finders go on; before torchvision itself, declare its operators."""
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None


def declare_missing_operators() -> bool:
    """Declare `nms` and `qnms` where torchvision's compiled operators cannot be loaded beside this torch.

    Returns:
        True if the schemas had to be declared.
    """
    global _library
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    import torch

    compiled = [file for file in Path(spec.submodule_search_locations[0]).glob("_C*") if file.suffix in (".so", ".pyd")]
    try:
        for file in compiled:
            torch.ops.load_library(str(file))  # as torchvision itself does when it is imported
        torch.ops.torchvision.nms  # noqa: B018  whether there is one
        return False
    except (OSError, AttributeError):
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            _library.define(schema)
        return True


def mend_on_import() -> None:
    """Have the operators declared when torchvision is first imported; nothing where it has been."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())
