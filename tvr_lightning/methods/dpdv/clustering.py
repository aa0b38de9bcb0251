"""Density-peak clustering with k nearest neighbors (DPC-KNN), used by DPDV, HBI, and TCFormer to merge tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.layers.one_hot import one_hot
from tvr_lightning.layers.patch_selector import first_largest

DensityRule = Literal["paper", "neighbours", "hbi"]
"""`paper` is exp(-mean of the k smallest distances), including the token itself at 0; `neighbours` excludes it;
`hbi` is HBI's and TCFormer's exp(-mean of squared distances), with distances divided by sqrt(D) and the
token itself included, and the densest token has the largest distance of the whole set instead of its own."""


@dataclass
class Clusters:
    """Clusters of the tokens of each set.

    Attributes:
        density: Density (..., T), larger for tokens with near neighbors.
        delta: Distance (..., T) to the nearest denser token.
        centre: Positions (..., K) int64 of the center tokens, by decreasing density times delta.
        assignment: Position (..., T) int64 in `centre` of the cluster of each token.
    """

    density: Tensor
    delta: Tensor
    centre: Tensor
    assignment: Tensor


@torch.no_grad()
def dpc_knn(tokens: Tensor, clusters: int, neighbours: int = 3, density: DensityRule = "paper") -> Clusters:
    """Cluster the tokens (..., T, D) of each set around K density peaks (Eq. 7 and the text around it).

    Centers are dense tokens far from all denser ones; every other token joins its nearest center. The first of several
    equal tokens counts, where the released codes add noise. Eq. 7 has its minimum and maximum over the wrong index: as
    in HBI and TCFormer (cluster.py), delta is the distance to the nearest token of strictly larger density, or the
    largest distance if there is none. `density` is explained at `DensityRule`.

    Raises:
        UserError: There are fewer tokens than clusters, or a number is below 1.
    """
    count = tokens.shape[-2]
    if count < 1 or neighbours < 1 or not 1 <= clusters <= count:
        raise UserError(
            f"{count} tokens cannot form {clusters} clusters with {neighbours} neighbours; clusters go from 1 to the "
            "number of tokens, neighbours from 1"
        )
    with torch.autocast(tokens.device.type, enabled=False):
        tokens = tokens.detach()
        distance = pairwise_distance(tokens.float() if tokens.dtype in (torch.float16, torch.bfloat16) else tokens)
        if density == "hbi":
            distance = distance / math.sqrt(tokens.shape[-1])
        log_density = _log_density(distance, neighbours, density)
        delta = _distance_to_denser(distance, log_density, whole_set=density == "hbi")
        centre = first_largest(log_density + delta.log(), clusters)
        assignment = _assignment(distance, centre)
    return Clusters(log_density.exp(), delta, centre, assignment)


def pairwise_distance(tokens: Tensor) -> Tensor:
    """Return Euclidean distances (..., T, T), exactly 0 for equal tokens, so that ties are not random."""
    return torch.cdist(tokens, tokens, compute_mode="donot_use_mm_for_euclid_dist")


def _log_density(distance: Tensor, neighbours: int, rule: DensityRule) -> Tensor:
    if rule == "neighbours":
        if distance.shape[-1] == 1:
            return distance.new_zeros(distance.shape[:-1])
        itself = torch.eye(distance.shape[-1], dtype=torch.bool, device=distance.device)
        nearest = distance.masked_fill(itself, torch.inf).sort(dim=-1).values
        return -nearest[..., : min(neighbours, distance.shape[-1] - 1)].mean(-1)
    nearest = distance.sort(dim=-1).values[..., : min(neighbours, distance.shape[-1])]
    return -(nearest.square() if rule == "hbi" else nearest).mean(-1)


def _distance_to_denser(distance: Tensor, density: Tensor, whole_set: bool) -> Tensor:
    denser = density.unsqueeze(-2) > density.unsqueeze(-1)  # [i, j]: j is denser than i
    nearest = distance.masked_fill(~denser, torch.inf).amin(-1)
    largest = distance.amax((-2, -1)).unsqueeze(-1) if whole_set else distance.amax(-1)
    return torch.where(denser.any(-1), nearest, largest.expand_as(nearest))


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
