"""What an audit for leakage says of an evaluation: it stands under the table and in its files."""

from __future__ import annotations

from dataclasses import dataclass, field

SHOWN = 5  # findings quoted under a table


@dataclass
class Verdict:
    """The outcome of an audit of a method with the options of an evaluation.

    Attributes:
        passed: it was carried out, and nothing leaks.
        leaks: what was found to leak, in words.
        problem: why the audit could not be carried out, or None.
        texts, videos: how many it was made on.
        experiments: how many comparisons were made.
        recall_with_help: text-to-video R@1 in percent where the method is told places and the ground truth.
        recall_without_help: the same where it is not.
        transductive: per direction, whether the score normalisation was found to use other test queries; empty where
            there is no normalisation.
    """

    passed: bool
    leaks: list[str] = field(default_factory=list)
    problem: str | None = None
    texts: int = 0
    videos: int = 0
    experiments: int = 0
    recall_with_help: float | None = None
    recall_without_help: float | None = None
    transductive: dict[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the sentence under a table."""
        if self.problem is not None:
            return f"Leakage: not audited, since the audit failed: {self.problem}"
        if self.passed:
            return f"Leakage: none found by the audit on {self.videos} videos ({self.experiments} experiments)"
        more = f" and {len(self.leaks) - SHOWN} more" if len(self.leaks) > SHOWN else ""
        return (
            f"LEAKAGE found by the audit on {self.videos} videos: {'; '.join(self.leaks[:SHOWN])}{more}; their R@1 is "
            f"{self.recall_with_help:.1f} with help, {self.recall_without_help:.1f} without"
        )


NOT_AUDITED = "Leakage: not audited; run `tvr audit`, or set evaluation.audit and test again"
NOT_AUDITABLE = "Leakage: cannot be audited, since the scores are external"
