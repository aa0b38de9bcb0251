"""Make `import torchvision` work with a CPU build of torch and a CUDA build of torchvision.

Such a torchvision cannot load its compiled operators, and its import fails with "operator torchvision::nms does not
exist", although this project (through torchmetrics and open_clip) only uses its image transforms. Declaring the two
operator schemas that the import needs is enough. If torchvision works or is not installed, nothing is changed.
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
_library: Any = None  # the declarations exist as long as this object


class TorchvisionFinder(MetaPathFinder):
    """Finder that finds no module, but declares torchvision's missing operators just before torchvision is imported.

    So `import tvr_lightning` imports neither torch nor torchvision and stays fast.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return None to continue with the usual finders; for torchvision, first declare its operators."""
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None


def declare_missing_operators() -> bool:
    """Declare `nms` and `qnms` if torchvision's compiled operators cannot be loaded with the installed torch.

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
            torch.ops.load_library(str(file))  # as in torchvision's own import
        torch.ops.torchvision.nms  # noqa: B018  whether there is one
        return False
    except (OSError, AttributeError):
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            _library.define(schema)
        return True


def mend_on_import() -> None:
    """Declare the operators when torchvision is first imported; do nothing if it has been imported."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())
