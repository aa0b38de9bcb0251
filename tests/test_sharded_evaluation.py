"""Three processes give the same table and metrics as one, although they cannot share the items evenly."""

import warnings

import torch

from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.metrics import RankMetric
from tvr_lightning.evaluation.normalization import DualSoftmax
from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.testing import run_processes
from tvr_lightning.testing.processes import quiet_trainer

VIDEOS = 7  # of the test split


class WorstRank(RankMetric):
    """A metric as users write it."""

    def value(self, ranks: Ranks) -> torch.Tensor:
        return ranks.expected().max()


def evaluate(rank, root, world):
    """Ranks of both directions, the table and the logged metrics, as this process has them."""
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    warnings.filterwarnings("ignore", message=".*some scores are below zero")
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1)
    result = {}
    for name, normalizer in {"plain": None, "dual softmax": DualSoftmax(5.0)}.items():
        config = EvaluationConfig(normalization=normalizer, metrics=[WorstRank()])
        method = CLIP4Clip(encoder, evaluation=config, words=12, frames=2)
        data = MSRVTT(root=root, frames=2, words=12, image_size=32, batch_size=6, eval_batch_size=2, num_workers=0)
        trainer = quiet_trainer(devices=world, strategy="ddp" if world > 1 else "auto")
        trainer.test(method, datamodule=data, verbose=False)
        found = method.evaluation
        result[name] = [
            [ranks.better.tolist(), ranks.tied.tolist(), ranks.index.tolist()]
            for ranks in (found.text_to_video_ranks, found.video_to_text_ranks)
        ]
        result[f"{name}, partial"] = [found.partial]
        table = {f"test/t2v_{name}": value for name, value in found.text_to_video.items()}
        table |= {f"test/v2t_{name}": value for name, value in found.video_to_text.items()}
        assert trainer.callback_metrics == table | {"test/SumR": found.sum_of_recalls}
        assert found.text_to_video["WorstRank"] == found.text_to_video_ranks.expected().max()
        assert not method.metrics["test"].text_to_video["R@1"].better  # reset by Lightning
        result[f"{name}, table"] = list(table.items())
    return result


def test_three_processes_rank_as_one_does(synthetic):
    root = str(synthetic("msrvtt", 5 * VIDEOS))
    alone = evaluate(0, root, 1)
    assert len(alone["plain"][1][0]) == VIDEOS
    assert len(set(alone["plain"][0][0])) > 2  # untrained, so that ranks spread
    for result in run_processes(evaluate, 3, root, 3):
        assert result == alone
