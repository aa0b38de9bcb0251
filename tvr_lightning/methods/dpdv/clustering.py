"""Density-peak clustering with k nearest neighbors (DPC-KNN), used by DPDV, HBI, and TCFormer to merge tokens."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tvr_lightning.layers.one_hot import one_hot
from tvr_lightning.layers.patch_selector import first_largest

DensityRule = Literal["paper", "neighbours", "hbi"]
"""`paper` is exp(-mean of the k smallest distances), including the token itself at 0; `neighbours` excludes it;
`hbi` is HBI's and TCFormer's exp(-mean of squared distances), with distances divided by sqrt(D) and the
token itself included, and the densest token has the largest distance of the whole set instead of its own."""


class Clusters(NamedTuple):
    """Clusters of the tokens (..., T, D) of each set around K centers."""

    density: Tensor  # (..., T), larger for tokens with near neighbors
    delta: Tensor  # (..., T), distance to the nearest denser token
    centre: Tensor  # (..., K) int64, positions of the centers, by decreasing density times delta
    assignment: Tensor  # (..., T) int64, position in `centre` of the cluster of each token


@torch.no_grad()
def dpc_knn(tokens: Tensor, clusters: int, neighbours: int = 3, density: DensityRule = "paper") -> Clusters:
    """Cluster the tokens (..., T, D) of each set around K density peaks (Eq. 7 and the text around it).

    Centers are dense tokens far from all denser ones; every other token joins its nearest center. The first of several
    equal tokens counts, where the released codes add noise. Eq. 7 has its minimum and maximum over the wrong index: as
    in HBI and TCFormer (cluster.py), delta is the distance to the nearest token of strictly larger density, or the
    largest distance if there is none.
    """
    with torch.autocast(tokens.device.type, enabled=False):
        tokens = tokens.float() if tokens.dtype in (torch.float16, torch.bfloat16) else tokens
        # Exactly 0 for equal tokens, so that ties are not random.
        distance = torch.cdist(tokens, tokens, compute_mode="donot_use_mm_for_euclid_dist")
        if density == "hbi":
            distance = distance / math.sqrt(tokens.shape[-1])
        log_density = _log_density(distance, neighbours, density)
        delta = _distance_to_denser(distance, log_density, whole_set=density == "hbi")
        centre = first_largest(log_density + delta.log(), clusters)
        return Clusters(log_density.exp(), delta, centre, _assignment(distance, centre))


def _log_density(distance: Tensor, neighbours: int, rule: DensityRule) -> Tensor:
    count = distance.shape[-1]
    if rule == "neighbours" and count > 1:
        itself = torch.eye(count, dtype=torch.bool, device=distance.device)
        distance, count = distance.masked_fill(itself, torch.inf), count - 1
    nearest = distance.sort(dim=-1).values[..., : min(neighbours, count)]
    return -(nearest.square() if rule == "hbi" else nearest).mean(-1)


def _distance_to_denser(distance: Tensor, density: Tensor, whole_set: bool) -> Tensor:
    denser = density.unsqueeze(-2) > density.unsqueeze(-1)  # [i, j]: j is denser than i
    nearest = distance.masked_fill(~denser, torch.inf).amin(-1)
    largest = distance.amax((-2, -1)).unsqueeze(-1) if whole_set else distance.amax(-1)
    return torch.where(denser.any(-1), nearest, largest)


def _assignment(distance: Tensor, centre: Tensor) -> Tensor:
    clusters = centre.shape[-1]
    to_centres = distance.gather(-1, centre.unsqueeze(-2).expand(*distance.shape[:-1], clusters))
    nearest = to_centres == to_centres.amin(-1, keepdim=True)
    number = torch.arange(clusters, device=distance.device)
    assignment = torch.where(nearest, number, clusters).amin(-1)
    return assignment.scatter(-1, centre, number.expand_as(centre))  # a center equal to another keeps its own cluster


def merge_tokens(tokens: Tensor, assignment: Tensor, clusters: int, weight: Tensor | None = None) -> Tensor:
    """Return the mean token (..., K, D) of each cluster, with positive weights (..., T) or equal ones."""
    # A product with the memberships, because a scattered sum adds in random order on a GPU.
    with torch.autocast(tokens.device.type, enabled=False):
        member = one_hot(assignment, clusters, tokens.dtype)
        if weight is not None:
            member = member * weight.to(tokens.dtype).unsqueeze(-1)
        return (member / member.sum(-2, keepdim=True)).transpose(-2, -1) @ tokens
