"""TC-MGC: deviations from the paper in `method.py`, equations in `model.py`, options in `options.py`."""

from tvr_lightning.methods.tcmgc.method import TCMGC
from tvr_lightning.methods.tcmgc.options import (
    Decorrelation,
    LanguageVideoAttention,
    SlotReorganization,
    TCMGCOptions,
)

__all__ = ["TCMGC", "Decorrelation", "LanguageVideoAttention", "SlotReorganization", "TCMGCOptions"]
