"""Balance of a retrieval gallery: summed retrieval probabilities, normalization error and error rates.

If the probabilities of an item add up to less than its share, its own queries miss it; if they add up to more, it is
returned to other queries (NCL, Park et al., section 3.2). Queries are rows and gallery items are columns. An item is
relevant to a query if both are in the same group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.evaluation.sources import ScoreSource, best_of_gallery, gallery_logsumexp, query_logsumexp

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)  # of the bins of mass divided by share


@dataclass
class Balance:
    """Balance of the retrieval in one direction, with its errors by retrieval mass (NCL, Fig. 3).

    Attributes:
        error: normalization error, the mean absolute difference between mass and share (NCL, Eq. 5).
        mass: (G,) float64, sum over all queries of the probability to retrieve each item.
        share: (G,) float64, mass if each query assigned its probability to its matches only; 1 if queries and items
            match one to one.
        rates: tensors (K,) of the bins of mass divided by share, by name: `edges`, their lower edges; `items`, number
            of gallery items; `false_negative`, mean over the items of the share of their relevant queries that do not
            retrieve them, NaN for an empty bin; `false_positive`, the same of irrelevant queries that retrieve them.
    """

    error: float
    mass: Tensor
    share: Tensor
    rates: dict[str, Tensor]

    def plain(self) -> dict[str, float | list[float]]:
        """Return error and rates as numbers and lists for a JSON file, with -1 for bins without items."""
        rates = {name: rate.nan_to_num(-1.0).tolist() for name, rate in self.rates.items()}
        return {"normalization_error": self.error, **rates}


def retrieval_mass(scores: ScoreSource, temperature: float) -> Tensor:
    """Return the masses (G,) of scores (Q, G) at a temperature: sum_i P(j | i), Q in total (NCL, section 3.2)."""
    scale = 1.0 / temperature
    return gallery_logsumexp(scores, scale, -query_logsumexp(scores, scale)).exp()


def matching_share(query_group: Tensor, gallery_group: Tensor) -> Tensor:
    """Return the mass (G,) of every item if each query spread its probability evenly over the items of its group."""
    groups = 1 + int(torch.cat([query_group, gallery_group]).max())
    queries = torch.bincount(query_group, minlength=groups).double()
    items = torch.bincount(gallery_group, minlength=groups).double()
    return queries[gallery_group] / items[gallery_group]


def balance(scores: ScoreSource, temperature: float, query_group: Tensor, gallery_group: Tensor) -> Balance:
    """Measure the balance of scores (Q, G); the matches of a query are the items of its group (Q,), (G,)."""
    query_group, gallery_group = query_group.to(scores.device), gallery_group.to(scores.device)
    mass, share = retrieval_mass(scores, temperature), matching_share(query_group, gallery_group)
    error = float((share - mass).abs().mean())
    return Balance(error, mass, share, error_rates(mass, best_of_gallery(scores, 1)[1], query_group, gallery_group))


def error_rates(
    mass: Tensor, retrieved: Tensor, query_group: Tensor, gallery_group: Tensor, edges: Sequence[float] = EDGES
) -> dict[str, Tensor]:
    """Return the `rates` of a `Balance` (NCL, Fig. 3); the last bin has no upper edge.

    The paper plots both without a formula; these are the usual rates per gallery item, averaged within bins.
    `retrieved` (Q, k) are the items that each query retrieves.
    """
    borders = torch.tensor(edges, dtype=torch.float64, device=mass.device)
    share = matching_share(query_group, gallery_group)
    relevant = torch.bincount(query_group, minlength=int(gallery_group.max()) + 1)[gallery_group].double()
    right = gallery_group[retrieved] == query_group[:, None]
    hits = torch.bincount(retrieved[right], minlength=len(mass)).double()
    wrong = torch.bincount(retrieved[~right], minlength=len(mass)).double()
    known = relevant > 0
    place = torch.bucketize((mass.double() / share)[known], borders, right=True) - 1
    items = torch.bincount(place, minlength=len(borders))

    def mean_in_bins(values: Tensor) -> Tensor:
        return torch.bincount(place, values[known], minlength=len(borders)) / items

    others = (len(query_group) - relevant).clamp(min=1.0)
    false = {"false_negative": 1 - hits / relevant.clamp(min=1.0), "false_positive": wrong / others}
    return {"edges": borders, "items": items} | {name: mean_in_bins(rate) for name, rate in false.items()}
