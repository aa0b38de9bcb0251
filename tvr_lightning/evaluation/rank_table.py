"""Table of ranks, from which the metrics of a run and their intervals can be computed again.

One row per query: `direction`, `index` (of the query in its split), `video` (that the query belongs to), `better` and
`tied` (see `Ranks`), `rank` (expected if scores are tied), and `query` in the folder of a run. In question answering, a
correct answer has `better` 0 and a wrong one 1.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.files import write_whole
from tvr_lightning.ranks import Ranks

QueryKind = Literal["text_to_video", "video_to_text", "question"]


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
