"""Options of methods that are out of range or that conflict."""

import re

import pytest
import torch
from methods.parts import FRAMES, WIDTH, WORDS, build, encoder, features

from tvr_lightning.encoders import TinyWhisperEncoder
from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.aggregation import ISA, MeanAggregation
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.layers.stochastic import Normal
from tvr_lightning.layers.temporal import SeqLSTM, SeqTransf
from tvr_lightning.methods import DRL, GAID, GARE, TCMGC, TMASS, XCLIP, CLIP4Clip, UCoFiA, XPool
from tvr_lightning.methods.clip4clip import CrossEncoder, TightTransf
from tvr_lightning.methods.dpdv.method import DPDV
from tvr_lightning.methods.dpdv.model import DPDVHead
from tvr_lightning.methods.dpdv.options import Divergence, DPDVOptions, EveryPatch, PatchMerging
from tvr_lightning.methods.drl import ChannelDecorrelation, DotProduct, TokenWise, WeightedTokenWise
from tvr_lightning.methods.gaid.options import DASP, STP, GAIDOptions, GatedFusion, NoFusion
from tvr_lightning.methods.gare.options import (
    Bottleneck,
    GapIncrement,
    LogMeanExp,
    NoIncrement,
    TextIncrement,
    TextPooling,
)
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, SlotReorganization
from tvr_lightning.methods.xclip import AOSM
from tvr_lightning.methods.xpool import XPoolOptions

NO_DIVERGENCE = {"divergence": Divergence(weight=0.0)}
CASES = {
    CLIP4Clip: [
        ({"similarity_header": "meanP"}, "similarity_header is meanP; it must be a SimilarityHeader"),
        ({"similarity_header": SeqTransf(0)}, "SeqTransf.blocks is 0; it must be at least 1"),
        ({"similarity_header": SeqLSTM(0)}, "SeqLSTM.layers is 0"),
        ({"similarity_header": TightTransf(1.5)}, "TightTransf.blocks is 1.5; it must be a number"),
    ],
    XCLIP: [
        ({"contrasts": ("words",)}, "it must be one of video_sentence"),
        ({"contrasts": ()}, "it must contain some of"),
        ({"contrasts": ("video_word", "video_word")}, "each once"),
        ({"similarity_header": TightTransf()}, "must be a TemporalHeader"),
        ({"similarity_aggregation": "max"}, "must be a Aggregation"),
        ({"similarity_aggregation": AOSM(0.0)}, "softmax_lambda is 0.0; it must be above 0"),
        ({"contrasts": ("frame_word",)}, "Set similarity_header to MeanP"),
        ({"contrasts": ("video_sentence",), "similarity_aggregation": MeanAggregation()}, "nothing to aggregate"),
        ({"contrasts": ("video_sentence", "sentence_frame"), "mask_words": True}, "has words to mask"),
        ({"contrasts": ("video_word",), "mask_frames": True}, "has frames to mask"),
    ],
    DRL: [
        ({"interaction": "xti"}, "must be a DRLInteraction"),
        ({"interaction": TokenWise("inf")}, "mask_fill is inf; it must be one of zero, exclude"),
        ({"interaction": WeightedTokenWise(4)}, "weight_layers is 4; it must be at least 1 and at most 3"),
        ({"interaction": TokenWise()}, "needs WTI's weights, but TokenWise has none"),
        ({"interaction": DotProduct(), "decorrelation": ChannelDecorrelation()}, "needs WTI's weights"),
        ({"decorrelation": ChannelDecorrelation("all")}, "tokens is all; it must be one of random, matched, weighted"),
        ({"decorrelation": ChannelDecorrelation(weight=-1.0)}, "weight is -1.0; it must be at least 0"),
    ],
    XPool: [({"heads": 7}, "must divide the dimension 64")],
    TMASS: [
        ({"trials": 0}, "trials is 0"),
        ({"trials": "most"}, "trials is most"),
        ({"support_weight": -1.0}, "support_weight is -1"),
        ({"prior": Normal(0.0)}, "Normal.std is 0.0"),
    ],
    TCMGC: [
        ({"keep_rate": 0.05}, "keep_rate 0.05 keeps 0 of 6 slots of reorganization.video_word"),
        ({"keep_rate": 1.5}, "keep_rate is 1.5; it must be above 0 and at most 1"),
        ({"keep_rate": 1.0}, "reorganization.sentence_frame: fusion has nothing to fuse"),
        ({"contrasts": ("video_word",)}, "decorrelation needs two contrasts, since the variance of video_word alone"),
        ({"contrasts": ()}, "it must contain some of video_sentence, video_word"),
        ({"contrasts": ("video_word", "patch_word")}, "it must be one of video_sentence, video_word"),
        ({"similarity_aggregation": ISA(0.0)}, "ISA.softmax_lambda is 0.0; it must be above 0"),
        ({"temporal_layers": -1}, "temporal_layers is -1"),
        ({"attention": LanguageVideoAttention(heads=3)}, "heads is 3; it must divide the dimension 64"),
        ({"attention": None, "contrasts": ("sentence_frame", "frame_word")}, "nothing would use the temporal encoder"),
    ],
    UCoFiA: [
        ({"scores": ("sentence_frame",)}, "Only video_sentence uses the temporal encoder"),
        ({"scores": ("video_sentence",), "patch_matrix": False}, "need word_patch in scores"),
        ({"scores": ("video_sentence",), "patch_selection": PatchSelection(kept=5)}, "need word_patch in scores"),
        ({"scores": ("video_sentence", "words")}, "it must be one of video_sentence"),
        ({"temporal_layers": -1}, "temporal_layers is -1"),
    ],
    GARE: [
        ({"increment": GapIncrement(dropout=1.0)}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"increment": GapIncrement(sign=0)}, "GapIncrement.sign is 0; it must be one of 1, -1"),
        ({"increment": GapIncrement(context="patches")}, "context is patches; it must be one of frames, words"),
        ({"increment": GapIncrement(dropout_per="text")}, "dropout_per is text; it must be one of pair, video"),
        ({"increment": NoIncrement(), "direction": LogMeanExp(alpha=1.0)}, "increment is NoIncrement"),
        ({"pooling": TextPooling(0.0)}, "TextPooling.temperature is 0.0; it must be above 0"),
        ({"pooling": "mean"}, "GAREOptions.pooling is mean; it must be a Pooling"),
        ({"temporal_layers": -1}, "temporal_layers is -1; it must be at least 0"),
        ({"fixed_temperature": 0.001}, "fixed_temperature is 0.001; it must be at least 0.01"),
    ],
    GAID: [
        ({"fusion": GatedFusion("word")}, "GatedFusion.level is word"),
        ({"perturbation": DASP(support_weight=-0.1)}, "DASP.support_weight is -0.1"),
        ({"perturbation": STP(trials=0)}, "STP.trials is 0"),
        ({"loss_weighting": "none"}, "loss_weighting is none"),
    ],
    DPDV: [
        ({"views": ()}, "it must contain some of macro, micro, each once"),
        ({"paths": ("spot", "spot")}, "each once"),
        ({"spot_ratio": 1.0}, "above 0 and below 1"),
        ({"recover_captions": 5}, "between 1 and captions (3)"),
        ({"path_weight": -1.0}, "path_weight is -1"),
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
        ({"temporal_layers": -1}, "temporal_layers is -1"),
        ({"patch_reduction": PatchMerging(ratio=0.0)}, "ratio is 0.0"),
        ({"patch_reduction": PatchMerging(ratio=1.5)}, "ratio is 1.5"),
        ({"patch_reduction": PatchMerging(stages=0)}, "stages is 0"),
        ({"patch_reduction": PatchMerging(neighbours=0)}, "neighbours is 0"),
        ({"patch_reduction": PatchMerging(heads=3)}, "does not divide the dimension 64"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "options", "message"), [(kind, *case) for kind, cases in CASES.items() for case in cases]
)
def test_options_that_conflict_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(kind, options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GapIncrement, {"dropout": 0.0, "dropout_per": "video"}, "dropout_per is video, but dropout is 0"),
        (TextIncrement, {"dropout": 0.0, "dropout_per": "video"}, "dropout_per is video, but dropout is 0"),
        (GapIncrement, {"context": "words", "dropout_per": "video"}, "context: words, psi mixes words"),
        (XPoolOptions, {"dropout": 0.0, "dropout_per": "video"}, "dropout_per is video, but dropout is 0"),
        (LanguageVideoAttention, {"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
        (LanguageVideoAttention, {"dropout": 0.0, "dropout_per": "video"}, "dropout_per is video, but dropout is 0"),
        (Bottleneck, {"weight": -1.0}, "Bottleneck.weight is -1.0; it must be at least 0"),
        (Bottleneck, {"prior": 0.0}, "Bottleneck.prior is 0.0; it must be above 0"),
        (Decorrelation, {"weight": -1.0}, "Decorrelation.weight is -1.0"),
        (SlotReorganization, {"words": "none"}, "SlotReorganization.words is none"),
        (Divergence, {"weight": -1}, "Divergence.weight is -1"),
    ],
)
def test_parts_out_of_range_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**options)


@pytest.mark.parametrize(
    ("kind", "options", "words", "frames", "message"),
    [
        (GARE, {"increment": TextIncrement(dropout=0.0)}, 6, 2, "and 4 frames, but got"),
        (TCMGC, {}, 7, 4, "built for 6 words and 4 frames"),
        (TCMGC, {}, 6, 3, "got 6 words and 3 frames"),
        (XCLIP, {}, 7, 4, "built for 6 words and 4 frames"),
        (UCoFiA, {}, 6, 3, "built for 6 words and 4 frames"),
    ],
)
def test_features_of_other_sizes_are_refused(kind, options, words, frames, message):
    with pytest.raises(ValueError, match=message):
        build(kind, options, torch.float32).score(*features(words=words, frames=frames, patches=9))


def test_missing_features_are_refused():
    text, video = features()
    video = VideoFeatures(video.frames, video.frame_mask)
    cases = [
        (lambda: build(TCMGC, {"attention": None}, torch.float32).score(text, video), "clip_frames is missing"),
        (lambda: build(UCoFiA, {}, torch.float32).encode_video(video), "needs patches"),
        (lambda: DPDVHead(WIDTH, WORDS, FRAMES, DPDVOptions())(text, video), "needs patches"),
        (lambda: CrossEncoder(WIDTH, layers=1, positions=4)(text, video), "4 frames need 5 position embeddings"),
        (
            lambda: GAID(encoder(), gaid=GAIDOptions(fusion=NoFusion()), audio_encoder=TinyWhisperEncoder()),
            r"audio_encoder conflicts with gaid\.fusion: NoFusion",
        ),
        (lambda: DPDV(encoder(), words=WORDS, frames=1), "two paths need at least 2"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    DPDV(encoder(), dpdv=DPDVOptions(paths=(), **NO_DIVERGENCE), words=WORDS, frames=1)
