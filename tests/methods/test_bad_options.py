"""Options of methods that are out of range or that conflict."""

import re

import pytest
import torch
from methods.parts import FRAMES, WIDTH, WORDS, build, encoder, features

from tvr_lightning.encoders import TinyWhisperEncoder
from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.aggregation import MeanAggregation
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.methods import DRL, GAID, GARE, TCMGC, TMASS, XCLIP, UCoFiA, XPool
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import CrossEncoder
from tvr_lightning.methods.dpdv.method import DPDV
from tvr_lightning.methods.dpdv.model import DPDVHead
from tvr_lightning.methods.dpdv.options import Divergence, DPDVOptions, EveryPatch, PatchMerging
from tvr_lightning.methods.drl import ChannelDecorrelation, DotProduct, TokenWise, WeightedTokenWise
from tvr_lightning.methods.gaid.options import GAIDOptions, GatedFusion, NoFusion
from tvr_lightning.methods.gare.options import Bottleneck, GapIncrement, LogMeanExp, NoIncrement, TextIncrement
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, SlotReorganization
from tvr_lightning.methods.xclip import AOSM

NO_DIVERGENCE = {"divergence": Divergence(weight=0.0)}
CASES = {
    XCLIP: [
        ({"contrasts": ()}, "it must contain some of"),
        ({"contrasts": ("video_word", "video_word")}, "each once"),
        ({"contrasts": ("frame_word",)}, "Set similarity_header to MeanP"),
        ({"contrasts": ("video_sentence",), "similarity_aggregation": MeanAggregation()}, "nothing to aggregate"),
        ({"contrasts": ("video_sentence", "sentence_frame"), "mask_words": True}, "has words to mask"),
        ({"contrasts": ("video_word",), "mask_frames": True}, "has frames to mask"),
    ],
    DRL: [
        ({"interaction": TokenWise()}, "needs WTI's weights, but TokenWise has none"),
        ({"interaction": DotProduct(), "decorrelation": ChannelDecorrelation()}, "needs WTI's weights"),
    ],
    XPool: [({"heads": 7}, "must divide the dimension 64")],
    TMASS: [({"trials": 0}, "trials is 0")],
    TCMGC: [
        ({"keep_rate": 0.05}, "keep_rate 0.05 keeps 0 of 6 slots of reorganization.video_word"),
        ({"keep_rate": 1.0}, "reorganization.sentence_frame: fusion has nothing to fuse"),
        ({"contrasts": ("video_word",)}, "decorrelation needs two contrasts, since the variance of video_word alone"),
        ({"attention": None, "contrasts": ("sentence_frame", "frame_word")}, "nothing would use the temporal encoder"),
    ],
    UCoFiA: [
        ({"scores": ("sentence_frame",)}, "Only video_sentence uses the temporal encoder"),
        ({"scores": ("video_sentence",), "patch_matrix": False}, "need word_patch in scores"),
        ({"scores": ("video_sentence",), "patch_selection": PatchSelection(kept=5)}, "need word_patch in scores"),
    ],
    GARE: [
        ({"increment": NoIncrement(), "direction": LogMeanExp(alpha=1.0)}, "increment is NoIncrement"),
        ({"temporal_layers": -1}, "temporal_layers is -1; expected"),
    ],
    DPDV: [
        ({"views": ()}, "it must contain some of macro, micro, each once"),
        ({"paths": ("spot", "spot")}, "each once"),
        ({"spot_ratio": 1.0}, "above 0 and below 1"),
        ({"recover_captions": 5}, "between 1 and captions (3)"),
        ({"paths": ()}, "Set divergence.weight to 0"),
        ({"paths": (), **NO_DIVERGENCE, "original_loss": False}, "no contrastive loss"),
        ({"paths": (), **NO_DIVERGENCE, "spot_partition": "pairwise"}, "paths is empty"),
        ({"path_weight": 0.0, **NO_DIVERGENCE}, "Set paths to []"),
        ({"path_weight": 0.0, "original_loss": False}, "no contrastive loss"),
        ({"paths": ("spot",), "recover_captions": 2}, "needs the path recover"),
        ({"recover_captions": 2, "macro_interaction": "ucofia"}, "Set recover_captions to 1"),
        ({"views": ("macro",), "patch_reduction": EveryPatch()}, "patch_reduction need the view micro"),
        ({"views": ("micro",), "macro_interaction": "mean"}, "needs the view macro"),
        ({"micro_interaction": "ucofia"}, "Use SelectedPatches"),
        ({"patch_reduction": PatchMerging(heads=3)}, "does not divide the dimension 64"),
    ],
    AOSM: [({"softmax_lambda": 0.0}, "AOSM.softmax_lambda is 0.0; expected")],
    GapIncrement: [({"dropout": 1.0}, "GapIncrement.dropout is 1.0; expected")],
    GatedFusion: [({"level": "word"}, "GatedFusion.level is 'word'")],
    PatchMerging: [({"ratio": 0.0}, "PatchMerging.ratio is 0.0")],
    SeqTransf: [({"blocks": 0}, "SeqTransf.blocks is 0; expected")],
    WeightedTokenWise: [({"weight_layers": 4}, "WeightedTokenWise.weight_layers is 4; expected")],
    LanguageVideoAttention: [({"dropout": 1.0}, "dropout is 1.0; expected")],
    Bottleneck: [({"weight": -1.0}, "Bottleneck.weight is -1.0; expected")],
    Decorrelation: [({"weight": -1.0}, "Decorrelation.weight is -1.0")],
    SlotReorganization: [({"words": "none"}, "SlotReorganization.words is 'none'")],
    Divergence: [({"weight": -1}, "Divergence.weight is -1")],
}


@pytest.mark.parametrize(
    ("kind", "options", "message"), [(kind, *case) for kind, cases in CASES.items() for case in cases]
)
def test_values_out_of_range_and_conflicting_options_are_rejected(kind, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(kind, options) if issubclass(kind, RetrievalModule) else kind(**options)


@pytest.mark.parametrize(
    ("kind", "options", "words", "frames"),
    [
        (GARE, {"increment": TextIncrement(dropout=0.0)}, WORDS, 2),
        (TCMGC, {}, 7, FRAMES),
        (XCLIP, {}, 7, FRAMES),
        (UCoFiA, {}, WORDS, 3),
    ],
)
def test_features_of_other_sizes_are_rejected(kind, options, words, frames):
    with pytest.raises(ValueError, match=rf"{WORDS} words and {FRAMES} frames, but got {words} words and {frames}"):
        build(kind, options, torch.float32).score(*features(words=words, frames=frames, patches=9))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda *f: build(TCMGC, {"attention": None}, torch.float32).score(*f), "clip_frames is missing"),
        (lambda text, video: build(UCoFiA, {}, torch.float32).encode_video(video), "needs patches"),
        (lambda *f: DPDVHead(WIDTH, WORDS, FRAMES, DPDVOptions())(*f), "needs patches"),
        (lambda *f: CrossEncoder(WIDTH, layers=1, positions=4)(*f), "4 frames need 5 position embeddings"),
        (
            lambda *f: GAID(encoder(), gaid=GAIDOptions(fusion=NoFusion()), audio_encoder=TinyWhisperEncoder()),
            r"audio_encoder conflicts with gaid\.fusion: NoFusion",
        ),
        (lambda *f: DPDV(encoder(), words=WORDS, frames=1), "two paths need at least 2"),
    ],
)
def test_missing_features_are_reported(call, message):
    text, video = features()
    with pytest.raises(ValueError, match=message):
        call(text, VideoFeatures(video.frames, video.frame_mask))


def test_a_single_frame_is_enough_without_paths():
    DPDV(encoder(), dpdv=DPDVOptions(paths=(), **NO_DIVERGENCE), words=WORDS, frames=1)
