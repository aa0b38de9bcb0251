"""One ranking out of the answers of several indexes.

A method's score of a pair does not depend on the gallery, so that scores compare wherever the weights are the same.
What does depend on it is measured on all indexes together: relevance on the greatest of their best cosines with
unrelated sentences, as one index of all videos would have it; places by sight among all that was found. Ranks by what
is said are each index's own, since full text search counts words in its own texts alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tvr_lightning.search.ranking import fuse
from tvr_lightning.search.relevance import NOTHING, Scale, judge
from tvr_lightning.search.results import Answer, Evidence, Result

NO_SCALE = "does not say how relevant its videos are; run tvr index on it again"


def comparable(answers: Sequence[tuple[str, Answer]]) -> tuple[list[tuple[str, Answer]], list[tuple[str, str]]]:
    """Return the answers whose scores compare with the first one's, and of the others the index and why not.

    Args:
        answers: with the name of their index.
    """
    kept: list[tuple[str, Answer]] = []
    others: list[tuple[str, str]] = []
    for name, answer in answers:
        known = kept[0] if kept else (name, answer)
        if answer.evidence is None:
            others.append((name, f"{name} does not say what its scores compare with; update tvr there"))
        elif known[1].evidence is not None and known[1].evidence.weights != answer.evidence.weights:
            others.append(
                (
                    name,
                    f"{name} was made with other weights than {known[0]}, so that scores do not compare; "
                    "its results are left out",
                )
            )
        else:
            kept.append((name, answer))
    return kept, others


def merge(answers: Sequence[tuple[str, Answer]], top: int, threshold: float | None, words: bool) -> Answer:
    """Return one answer of several whose scores compare.

    Args:
        answers: at least one, with the name of their index, each with its evidence.
        top: how many results.
        threshold: relevance that results have at least; None keeps all.
        words: whether the query has words.
    """
    first = answers[0][1]
    nearest = [answer.nearest for _, answer in answers if answer.nearest is not None]
    merged = Answer(
        first.query,
        first.rerank,
        first.normalize,
        sum(answer.candidates for _, answer in answers),
        sum(answer.videos for _, answer in answers),
        results=_ranked([result for _, answer in answers for result in answer.results])[:top],
        nearest=max(nearest, default=None),
    )
    for rank, result in enumerate(merged.results, 1):
        result.rank = rank
    merged.unanswered = [name for _, answer in answers for name in answer.unanswered]
    # How well anything matches is judged anew.
    shared = [note for _, answer in answers for note in answer.notes if not note.startswith(NOTHING)]
    empty = {"no video matches the filters", "the index contains no videos yet"} if merged.results else set()
    merged.notes = [note for note in dict.fromkeys(shared) if note not in empty]
    scaled = [(name, answer.evidence.background) for name, answer in answers if answer.evidence and answer.videos]
    unmeasured = [name for name, background in scaled if not background]
    background = [] if unmeasured or not scaled else torch.tensor([each for _, each in scaled]).amax(0).tolist()
    if words:
        merged.notes += [f"{name} {NO_SCALE}" for name in unmeasured]
        judge(merged, Scale.of(torch.tensor(background)) if background else None, threshold)
    merged.evidence = Evidence(first.evidence.weights if first.evidence else "", background)
    return merged


def _ranked(results: list[Result]) -> list[Result]:
    """Return results of several indexes best first: by score, and where something is said by both ranks, fused."""
    by_score = sorted(results, key=lambda result: -result.score)
    if not any(result.by_sound for result in by_score):
        for place, result in enumerate(by_score, 1):
            result.by_sight = place
        return by_score
    for place, result in enumerate(by_score, 1):
        # What is not among an index's first results is not seen here, so that the place is at least that there.
        result.by_sight = max(place, result.by_sight)
    sight = {str(place): result.by_sight for place, result in enumerate(by_score)}
    sound = {str(place): result.by_sound for place, result in enumerate(by_score) if result.by_sound is not None}
    fused = fuse(sight, sound)
    order = sorted(range(len(by_score)), key=lambda place: (-fused[str(place)], by_score[place].by_sight))
    return [by_score[place] for place in order]
