"""Density-peak clustering with k nearest neighbours (DPC-KNN), as DPDV, HBI and TCFormer merge tokens with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tvr_lightning.layers.one_hot import one_hot
from tvr_lightning.layers.patch_selector import first_largest

DensityRule = Literal["paper", "neighbours", "hbi"]


@dataclass
class Clusters:
    """Which tokens of each set belong together.

    Attributes:
        density: (..., T), larger where a token has near neighbours.
        delta: (..., T), distance to the nearest denser token.
        centre: (..., K) int64, tokens that are centres, by falling density times delta.
        assignment: (..., T) int64, position in `centre` of each token's cluster.
    """

    density: Tensor
    delta: Tensor
    centre: Tensor
    assignment: Tensor


@torch.no_grad()
def dpc_knn(tokens: Tensor, clusters: int, neighbours: int = 3, density: DensityRule = "paper") -> Clusters:
    """Cluster the T tokens of each set around density peaks (Eq. 7 and the text around it).

    A token is a centre where it is dense and far from everything denser; each other token goes to its nearest centre.
    Nothing is random: the released codes add noise of 1e-6 to break ties, here the first of several equals is taken.
    Equal tokens therefore give a defined result, and densities that underflow still have their order, because they are
    compared by their logarithms.

    Eq. 7 prints minimum and maximum over the wrong index. Here, as in HBI and TCFormer (cluster.py): the distance to
    the nearest token of strictly larger density, and where there is none, the largest distance.

    Args:
        tokens: (..., T, D).
        clusters: K, from 1 to T.
        neighbours: k; no more than there are.
        density: `paper` is exp(-mean of the k smallest distances), the token itself among them at distance 0;
            `neighbours` leaves the token itself out; `hbi` is HBI's and TCFormer's exp(-mean of squared distances)
            with distances divided by sqrt(D), the token itself among them, and takes for the densest token the largest
            distance of the whole set instead of its own largest.

    Returns:
        The clusters, in float32 at least.

    Raises:
        ValueError: no token, more clusters than tokens, or a number below 1.
    """
    count = tokens.shape[-2]
    if count < 1 or neighbours < 1 or not 1 <= clusters <= count:
        raise ValueError(
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
    """Return Euclidean distances (..., T, T) of tokens (..., T, D); equal tokens are exactly 0 apart.

    The usual shortcut over inner products would leave about 1e-3 between equal tokens, and ties would fall at random.
    """
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
    return assignment.scatter(-1, centre, number.expand_as(centre))  # a centre that equals another keeps its own


def merge_tokens(tokens: Tensor, assignment: Tensor, clusters: int, weight: Tensor | None = None) -> Tensor:
    """Return the mean token (..., K, D) of each cluster.

    Args:
        tokens: (..., T, D).
        assignment: (..., T) int64, cluster of each token; every cluster has one.
        clusters: K.
        weight: (..., T) positive weight of each token in its cluster's mean; equal where it is not given.
    """
    # A product with the memberships rather than a scattered sum, which adds in random order on a GPU.
    with torch.autocast(tokens.device.type, enabled=False):
        member = one_hot(assignment, clusters, tokens.dtype)
        if weight is not None:
            member = member * weight.to(tokens.dtype).unsqueeze(-1)
        return (member / member.sum(-2, keepdim=True)).transpose(-2, -1) @ tokens
