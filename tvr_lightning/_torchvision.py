"""Make `import torchvision` work with a CPU build of torch and a CUDA build of torchvision.

Such a torchvision cannot load its compiled operators, and its import fails with "operator torchvision::nms does not
exist", although this project (through torchmetrics and open_clip) only uses its image transforms. Declaring the two
operators that the import needs is enough. If torchvision works or is not installed, nothing is changed.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from typing_extensions import override

_library: Any = None  # the declarations exist as long as this object


class TorchvisionFinder(MetaPathFinder):
    """Finder that finds no module, but declares torchvision's missing operators just before torchvision is imported.

    So `import tvr_lightning` imports neither torch nor torchvision and stays fast.
    """

    @override
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_missing_operators()


def declare_missing_operators() -> None:
    """Declare `nms` and `qnms` if torchvision's compiled operators cannot be loaded with the installed torch."""
    global _library
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    try:
        for compiled in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(compiled))  # as in torchvision's own import
        torch.ops.torchvision.nms  # noqa: B018  whether there is one
    except (OSError, AttributeError):
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
