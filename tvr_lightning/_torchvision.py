"""Make `import torchvision` work with a CPU build of torch and a CUDA build of torchvision.

Such a torchvision cannot load its compiled operators, and its import fails with "operator torchvision::nms does not
exist", although this project (through torchmetrics and open_clip) only uses its image transforms. Declaring the two
operators that the import needs is enough. If torchvision works or is not installed, nothing is changed.
"""

from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class TorchvisionFinder:
    """Finder that finds no module, but declares torchvision's missing operators just before torchvision is imported."""

    operators: Any = None  # the declarations exist as long as this object

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Find nothing, as the import system allows."""
        found = PathFinder.find_spec(fullname) if fullname == "torchvision" and self.operators is None else None
        if found is None or found.origin is None:
            return
        import torch

        try:
            for compiled in Path(found.origin).parent.glob("_C*.so"):
                torch.ops.load_library(str(compiled))  # as in torchvision's own import
            torch.ops.torchvision.nms  # noqa: B018  whether there is one
        except (OSError, AttributeError):
            self.operators = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                self.operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
