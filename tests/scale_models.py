"""Every method, small and comparable over processes, and question answering; shared by tests of training at scale."""

from functools import partial
from pathlib import Path

import torch

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
import lightning.pytorch as pl

from tvr_lightning.data.batch import PairBatch
from tvr_lightning.data.msrvtt_qa import QuestionRecord
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.methods import CLIP4Clip, VideoQuestionAnswering
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import CLIP4ClipOptions
from tvr_lightning.testing import method_recipes, random_pairs, small
from tvr_lightning.testing.processes import Batches, comparable, descending
from tvr_lightning.testing.small import BATCH, FRAMES, WORDS

RECIPES = method_recipes(Path(__file__).parent.parent / "recipes")


def build(name: str, *overrides: str, root: str | None = None) -> RetrievalModule:
    """Build a method by its title, with seeded weights; `root` as in `small`."""
    return comparable(small(RECIPES[name], *overrides, root=root)[0])


def pairs(method: RetrievalModule, seed: int = 0) -> PairBatch:
    """A batch of random pairs for a method."""
    return random_pairs(method, BATCH, seed)


def answering() -> pl.LightningModule:
    """Question answering on CLIP4Clip, with seeded float64 weights."""
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=2, vision_layers=2)
    method = partial(CLIP4Clip, words=WORDS, frames=FRAMES, clip4clip=CLIP4ClipOptions(SeqTransf(2)))
    module = VideoQuestionAnswering(encoder, method, answers=3, hidden=32, dropout=0.0)
    return descending(module.double())


class Questions(Batches):
    """Batches with a question about each of their pairs, of which two have an answer that is not learned."""

    def questions(self, split: str) -> list[QuestionRecord]:
        answers = ["ball", "ball", "ball", "box", "red", "box", "red", "blue"]
        return [QuestionRecord(f"what is {i}", i, answer=answer) for i, answer in enumerate(answers[:BATCH])]
