"""Table of the ranks of all queries, from which the metrics of a run and their intervals can be computed again.

One row per query: `direction`, `index` (of the query in its split), `video` (that the query belongs to), `better` and
`tied` (see `Ranks`), `rank` (expected if scores are tied), and `query` in the folder of a run. In question answering, a
correct answer has `better` 0 and a wrong one 1.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.statistics import Interval, median_interval, proportion_interval
from tvr_lightning.files import write_whole
from tvr_lightning.ranks import Ranks

QueryKind = Literal["text_to_video", "video_to_text", "question"]
METRIC = re.compile(r"R@\d+|nDCG@\d+|MRR|MdR|MnR|RSum|SumR")
"""Metrics that can be computed again from ranks."""
SUMS = ("RSum", "SumR")
MEANING = "Intervals are over queries: the gallery is fixed, and training was not repeated."
TRANSDUCTIVE = "They may be too narrow, since the normalization uses the other test queries."


def write_ranks(
    path: Path, ranked: Mapping[QueryKind, tuple[Ranks, Sequence[str] | Tensor]], queries: Sequence[str] | None = None
) -> None:
    """Write the ranks of the queries of each kind, in ascending order of index, and their videos (Q,) as parquet.

    `queries` are the texts or names of all queries, if the table should contain them.
    """
    import pandas as pd

    parts = []
    for kind, (ranks, video) in ranked.items():
        columns = {"index": ranks.index, "better": ranks.better, "tied": ranks.tied, "rank": ranks.expected()}
        part = pd.DataFrame({name: column.cpu() for name, column in columns.items()})
        parts.append(part.assign(direction=kind.replace("_", "-"), video=np.asarray(video)))
    table = pd.concat(parts, ignore_index=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (table if queries is None else table.assign(query=queries)).to_parquet(index=False))


def read_ranks(path: Path, kind: QueryKind) -> tuple[Ranks, Tensor]:
    """Return the ranks of one kind of query in ascending order of index, and numbers (Q,) int64 of their videos."""
    import pandas as pd

    table = pd.read_parquet(path)
    if not {"index", "better", "tied"} <= set(table):
        raise UserError(f"{path} does not contain ties. Test the checkpoint again with tvr test.")
    table["video"] = pd.factorize(table["video"])[0]
    table = table[table["direction"].str.replace("_", "-") == kind.replace("_", "-")].sort_values("index")
    better, tied, index, video = torch.tensor(table[["better", "tied", "index", "video"]].to_numpy()).T
    return Ranks(better, tied, index), video


@dataclass
class QueryValues:
    """Values of Q queries: a metric is `start` plus `scale` times their weighted mean, or their median.

    `values` (Q,) are from 0 to 1. `weight` (Q,) is 1 on average and the same in sum for each kind of query. `index` and
    `video` (Q,) are those of each query; queries of one video are not independent.
    """

    values: Tensor
    weight: Tensor
    index: Tensor
    video: Tensor
    start: float
    scale: float

    @classmethod
    def of(
        cls,
        ranks_of: Callable[[QueryKind], tuple[Ranks, Tensor]],
        direction: QueryKind,
        metric: str,
        columns: Iterable[str],
    ) -> "QueryValues":
        """Return the values of a metric, one of METRIC or accuracy.

        `ranks_of` returns the ranks of one kind of query, and the video (Q,) of each query. `direction` is the kind,
        unless the metric has its own. RSum and SumR add the recalls among `columns`, the names of the run's metrics.
        """
        kinds: tuple[QueryKind, ...] = (direction,)
        if metric in ("SumR", "accuracy"):
            kinds = ("text_to_video", "video_to_text") if metric == "SumR" else ("question",)
        names = summed_recalls(columns) if metric in SUMS else [metric]
        ranks, videos = zip(*map(ranks_of, kinds), strict=True)
        video = torch.cat(videos)
        start = 0.0
        scale = 100.0 * len(names) * len(kinds)
        if metric in ("MnR", "MdR"):
            expected = ranks[0].expected()
            start = 1.0
            scale = max(float(expected.max()) - 1, len(video.unique()) - 1, 1.0)
            parts = [(expected - start) / scale]
        else:
            parts = [torch.stack([_gain(each, *name.partition("@")[::2]) for name in names]).mean(0) for each in ranks]
        weight = [torch.full_like(part, len(video) / (len(kinds) * len(part))) for part in parts]
        index = torch.cat([each.index for each in ranks])
        return cls(torch.cat(parts), torch.cat(weight), index, video, start, scale)


def summed_recalls(columns: Iterable[str]) -> list[str]:
    """Return the recalls that RSum adds, among the names of a run's metrics; further recalls come after RSum."""
    return [name for name in takewhile("RSum".__ne__, columns) if name.startswith("R@")]


def _gain(ranks: Ranks, metric: str, k: str) -> Tensor:
    if metric == "MRR":
        return ranks.reciprocal()
    return ranks.normalized_gain(int(k)) if metric == "nDCG" else ranks.found_within(int(k or 1))


def metric_interval(seeds: Sequence[QueryValues], metric: str) -> Interval:
    """Return the 95 % interval of the mean of a metric over several seeds, whose queries are the same."""
    first = seeds[0]
    scale = max(own.scale for own in seeds)
    values = torch.stack([own.values * (own.scale / scale) for own in seeds])
    if metric == "MdR":
        each = [median_interval(own, first.video) for own in values]
    else:
        each = [proportion_interval(values.mean(0), first.video, first.weight)]
    ends = torch.tensor([[own.estimate, own.low, own.high] for own in each], dtype=torch.float64).mean(0)
    return Interval(*(first.start + scale * ends).tolist())


def metric_intervals(
    ranks: tuple[Ranks, Ranks], video_of_text: Tensor, columns: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return `low` and `high` of the metrics of texts and videos by direction and name; SumR is of both directions.

    `video_of_text` (N,) is the video of each text of the split, and other metrics than METRIC are left out.
    """
    texts, videos = ranks
    if not len(texts) or not len(videos):
        return {}
    queries: dict[QueryKind, tuple[Ranks, Tensor]] = {
        "text_to_video": (texts, video_of_text[texts.index]),
        "video_to_text": (videos, videos.index),
    }
    found: dict[str, dict[str, dict[str, float]]] = {"text-to-video": {}, "video-to-text": {}, "both directions": {}}
    for (row, intervals), direction in zip(found.items(), (*queries, "text_to_video"), strict=True):
        for name in ["SumR"] if row == "both directions" else filter(METRIC.fullmatch, columns):
            interval = metric_interval([QueryValues.of(queries.__getitem__, direction, name, columns)], name)
            intervals[name] = {"low": interval.low, "high": interval.high}
    return found
