"""Make `import torchvision` work where a CPU torch lies beside a CUDA-built torchvision.

Such a torchvision cannot load its compiled operators, and its import then fails with "operator torchvision::nms does
not exist", although this project (through torchmetrics and open_clip) uses its image transforms only. Declaring the
two operator schemas that the import looks up is enough. Where torchvision is healthy or absent, nothing is done.
"""

import importlib
import importlib.util
import sys

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # the declarations live as long as this object


def declare_missing_operators() -> bool:
    """Import torchvision, declaring `nms` and `qnms` if their absence is what makes the import fail.

    Returns:
        True if the schemas had to be declared.

    Raises:
        RuntimeError: torchvision fails to import for another reason.
    """
    global _library
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return False
    try:
        importlib.import_module("torchvision")
        return False
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        _library.define(schema)
    importlib.import_module("torchvision")
    return True
