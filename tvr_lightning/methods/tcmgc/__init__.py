"""TC-MGC: `method.py` says where it deviates from its paper, `model.py` has its equations, `options.py` its options."""

from tvr_lightning.methods.tcmgc.method import TCMGC
from tvr_lightning.methods.tcmgc.options import (
    Decorrelation,
    LanguageVideoAttention,
    SlotReorganization,
    TCMGCOptions,
)

__all__ = ["TCMGC", "Decorrelation", "LanguageVideoAttention", "SlotReorganization", "TCMGCOptions"]
