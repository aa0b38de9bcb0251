"""Head that scores all answers to a question about a video. `video_qa.py` lists what the paper leaves open."""

from typing import Literal

import torch
from torch import Tensor, nn

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods.checks import refuse
from tvr_lightning.methods.dpdv.model import spot_frames
from tvr_lightning.methods.dpdv.options import Share
from tvr_lightning.option_types import Count, Dropout, check

FramePooling = Literal["spot", "mean"]
Inputs = Literal["both", "question", "video"]


class AnswerHead(nn.Module):
    """Pooling of a question and its video, and an MLP that scores every answer.

    Args:
        dimension: Dimension D of the features.
        answers: Number of answers A.
        hidden: Width of the MLP.
        dropout: Dropout rate before both linear layers.
        pooling: `spot` averages the frames most similar to the question (DPDV, Eq. 3), `mean` averages all frames.
        spot_ratio: Share of a video's frames that `spot` selects, at least one frame (paper: half).
        micro: Whether to add the patches most similar to the question's words.
        inputs: Inputs that the answer depends on. `question` measures the accuracy of the question text alone.
    """

    def __init__(
        self,
        dimension: int,
        answers: Count,
        hidden: Count = 1024,
        dropout: Dropout = 0.1,
        pooling: FramePooling = "spot",
        spot_ratio: Share = 0.5,
        micro: bool = False,
        inputs: Inputs = "both",
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.spot_ratio = spot_ratio
        self.micro = micro
        self.inputs = inputs
        check(self, dimension=dimension, answers=answers, hidden=hidden, dropout=dropout)
        refuse(
            (
                pooling == "mean" and spot_ratio != 0.5,
                f"spot_ratio {spot_ratio} is an option of pooling: spot. Remove it for pooling: mean.",
            ),
            (
                micro and inputs != "both",
                f"micro relates words and patches, so inputs must be both, not {inputs}",
            ),
        )
        width = dimension * (3 if micro else 2)
        self.classify = nn.Sequential(
            nn.LayerNorm(width),
            nn.Dropout(dropout),
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, answers),
        )

    def forward(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """Return the logits (B, A) of the answers to B questions about B videos, row by row."""
        chosen = self.spotted(text.sentence, video) if self.pooling == "spot" else video.frame_mask
        question, macro = text.sentence, masked_mean(video.frames, chosen)
        # Multiplied by 0 rather than left out, so that shapes stay and every parameter gets a gradient.
        if self.inputs == "question":
            macro = 0.0 * macro
        elif self.inputs == "video":
            question = 0.0 * question
        parts = [question, macro]
        if self.micro:
            assert video.patches is not None
            parts.append(words_patches(text, video.patches, chosen))
        return self.classify(torch.cat(parts, dim=-1))

    def spotted(self, sentence: Tensor, video: VideoFeatures) -> Tensor:
        """Return a mask (B, F) of the frames of each video most similar to its question (B, D) (DPDV, Eq. 3)."""
        similarity = torch.einsum("bd,bfd->bf", unit(sentence), unit(video.frames))
        return spot_frames(similarity, video.frame_mask.bool(), self.spot_ratio)


def words_patches(text: TextFeatures, patches: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean (B, D) of the patches most similar to each word of B questions (DPDV, Eq. 5, inner maximum).

    Patches (B, F, P, D) are those of the frames in the mask `chosen` (B, F).
    """
    flat = patches.flatten(1, 2)
    cosine = unit(text.words) @ unit(flat).mT
    usable = chosen.repeat_interleave(patches.shape[2], dim=1).unsqueeze(1)
    best = cosine.masked_fill(~usable, -torch.inf).argmax(dim=-1)
    taken = flat.gather(1, best.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))
    return masked_mean(taken, text.word_mask)
