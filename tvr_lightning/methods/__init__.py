"""Methods of the papers (one package each) and baselines (one module each)."""

from tvr_lightning.methods.clip4clip import CLIP4Clip
from tvr_lightning.methods.dpdv.method import DPDV
from tvr_lightning.methods.drl import DRL
from tvr_lightning.methods.gaid.method import GAID
from tvr_lightning.methods.gare.method import GARE
from tvr_lightning.methods.ncl.method import NCL
from tvr_lightning.methods.tcmgc.method import TCMGC
from tvr_lightning.methods.tmass import TMASS
from tvr_lightning.methods.ucofia import UCoFiA
from tvr_lightning.methods.video_qa import VideoQuestionAnswering
from tvr_lightning.methods.xclip import XCLIP
from tvr_lightning.methods.xpool import XPool

__all__ = [
    "DPDV",
    "DRL",
    "GAID",
    "GARE",
    "NCL",
    "TCMGC",
    "TMASS",
    "XCLIP",
    "CLIP4Clip",
    "UCoFiA",
    "VideoQuestionAnswering",
    "XPool",
]
