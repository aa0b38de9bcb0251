"""Every method, small, with dropout off, and pairs to train it on; shared by tests of training at scale.

In float64, where rounding hides no difference between one device and several.
"""

import warnings
from functools import partial

import torch
from torch import Tensor, nn

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from tvr_lightning.data.batch import AudioInput, Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.data.msrvtt_qa import QuestionRecord
from tvr_lightning.encoders import TinyClipEncoder, TinyWav2Vec2Encoder
from tvr_lightning.methods import DPDV, DRL, GAID, GARE, NCL, TCMGC, TMASS, XCLIP, CLIP4Clip, UCoFiA, XPool
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.gaid import GAIDOptions
from tvr_lightning.methods.gare import GapIncrement, GAREOptions
from tvr_lightning.methods.tcmgc import LanguageVideoAttention, TCMGCOptions
from tvr_lightning.methods.tmass import TMASSOptions
from tvr_lightning.methods.ucofia import UCoFiAOptions
from tvr_lightning.methods.video_qa import VideoQuestionAnswering
from tvr_lightning.methods.xpool import XPoolOptions

BATCH, WORDS, FRAMES, SIDE = 8, 8, 3, 32
COLOURS, SHAPES = ("red", "green", "blue", "white"), ("ball", "box")
METHODS = ("CLIP4Clip", "XCLIP", "DRL", "UCoFiA", "XPool", "TMASS", "GAID", "GARE", "TCMGC", "DPDV", "NCL", "VideoQA")


def build(name: str, gather: str = "global") -> pl.LightningModule:
    """Build a method with seeded float64 weights, trained by plain gradient descent: Adam would hide a wrong scale."""
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=SIDE, text_layers=2, vision_layers=2, text_mask=name == "GARE")
    common = {"encoder": encoder, "words": WORDS, "frames": FRAMES, "gather": gather}
    attention = XPoolOptions(dropout=0.0)
    language, temporal = LanguageVideoAttention(dropout=0.0), {"temporal_layers": 2}
    build_method = {
        "CLIP4Clip": lambda: CLIP4Clip(**common, similarity_header="seqTransf", **temporal),
        "XCLIP": lambda: XCLIP(**common, similarity_header="seqTransf", **temporal),
        "DRL": lambda: DRL(**common, interaction="wti", **temporal),
        "UCoFiA": lambda: UCoFiA(**common, ucofia=UCoFiAOptions(**temporal)),
        "XPool": lambda: XPool(**common, xpool=attention),
        "TMASS": lambda: TMASS(**common, tmass=TMASSOptions(attention)),
        "GAID": lambda: GAID(**common, gaid=GAIDOptions(attention=attention), audio_encoder=TinyWav2Vec2Encoder()),
        "GARE": lambda: GARE(**common, gare=GAREOptions(**temporal, increment=GapIncrement(dropout=0.0))),
        "TCMGC": lambda: TCMGC(**common, tcmgc=TCMGCOptions(2, attention=language, keep_rate=0.4)),
        "DPDV": lambda: DPDV(**common, captions=2, recover_captions=1),
        "NCL": lambda: CLIP4Clip(**common, contrast=NCL(queue_size=20)),
        "VideoQA": lambda: VideoQuestionAnswering(
            encoder,
            partial(CLIP4Clip, words=WORDS, frames=FRAMES, similarity_header="seqTransf", **temporal),
            answers=3,
            hidden=32,
            dropout=0.0,
        ),
    }[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is an instance of `nn.Module`")
        method = build_method().double()
    if name == "UCoFiA":
        method.selector.register_forward_pre_hook(_same_noise)
    method.configure_optimizers = lambda: torch.optim.SGD(  # sharding replaces parameters, so not before it is due
        [parameter for parameter in method.parameters() if parameter.requires_grad], lr=0.1
    )
    return method


def _same_noise(selector: nn.Module, inputs: tuple) -> tuple:
    """Give every frame the same noise, however many processes share the batch."""
    draws = torch.randn(selector.options.samples, inputs[1].shape[2], dtype=inputs[1].dtype)
    return (*inputs, draws.expand(*inputs[1].shape[:2], -1, -1))


class Batches(pl.LightningDataModule):
    """Batches, and a question about each of their pairs, of which two have an answer that is not learnt."""

    store = None

    def __init__(self, batches: list[PairBatch]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)

    def questions(self, split: str) -> list[QuestionRecord]:
        answers = ["ball", "ball", "ball", "box", "red", "box", "red", "blue"]
        return [QuestionRecord(f"what is {i}", i, answer=answer) for i, answer in enumerate(answers[:BATCH])]


def pairs(items: int, seed: int = 0) -> PairBatch:
    """B pairs of captions and clips with sound and descriptions."""
    generator = torch.Generator().manual_seed(seed)
    texts = [f"a {COLOURS[i % 4]} {SHAPES[i // 4 % 2]}" for i in range(items)]
    index = torch.arange(items)
    pixels = torch.randint(0, 256, (items, FRAMES, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    mask = torch.ones(items, FRAMES, dtype=torch.bool)
    mask[::3, -1] = False
    steps = torch.full((items,), 45)
    windows = torch.stack([torch.tensor([15 * i, 15 * (i + 1)]) for i in range(FRAMES)]).expand(items, FRAMES, 2)
    waves = 0.1 * torch.randn(items, 14400, generator=generator)
    sound = AudioInput(waves, torch.full((items,), 14400), steps, windows.clone())
    media = Media(pixels, mask, audio=sound, audio_mask=sound.mask)
    video = VideoBatch(media, index, [f"video{i}" for i in range(items)])
    described = [[f"{text} moves", f"there is {text}"] for text in texts]
    return PairBatch(TextBatch(texts, index), video, {"recover_captions": described})


def strategies(name: str, world: int) -> dict[str, object]:
    """Return the strategies that train a method on `world` processes, by name."""
    sharded = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False)
    # Answering leaves what only scores pairs without a gradient.
    return {"ddp": "ddp_find_unused_parameters_true" if name == "VideoQA" else "ddp", "fsdp2": sharded}


class Reseed(pl.Callback):
    """Starts every step with the same random numbers on all processes, and notes the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        torch.manual_seed(batch_idx)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))


def train(
    method: RetrievalModule,
    steps: int,
    rank: int = 0,
    world: int = 1,
    strategy: object = "auto",
    clip: float | None = 1.0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this process's contiguous share of each batch; return the losses and all weights in full."""
    share = BATCH // world
    batches = [pairs(BATCH, seed)[slice(rank * share, (rank + 1) * share)] for seed in range(steps)]
    noted = Reseed()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=world, strategy=strategy, use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[noted],
        gradient_clip_val=clip, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(method, datamodule=Batches(batches))
    weights = {name: full(tensor) for name, tensor in method.state_dict().items()}
    return noted.losses, weights


def full(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as a whole."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
