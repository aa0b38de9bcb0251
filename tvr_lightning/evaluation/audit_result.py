"""Result of a leakage audit, as shown below the results table and stored in result files."""

from dataclasses import dataclass, field

from tvr_lightning.errors import abbreviated


@dataclass
class AuditResult:
    """Result of the leakage audit of a method with the options of an evaluation.

    Attributes:
        passed: True if the audit was completed and found no leak.
        leaks: descriptions of the leaks found.
        problem: reason why the audit could not be completed, or None.
        texts, videos: number of texts and videos in the audit.
        experiments: number of comparisons.
        recall_with_help: text-to-video R@1 in percent if the method has access to indices and ground truth; None if the
            audit could not be completed.
        recall_without_help: the same without this access.
        transductive: per direction, True if the score normalization was found to use other test queries; empty without
            normalization.
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
        """Return the line below a results table."""
        if self.problem is not None and not self.leaks:
            return f"Leakage: not audited, since the audit failed: {self.problem}"
        if self.passed:
            return f"Leakage: none found by the audit on {self.videos} videos ({self.experiments} experiments)"
        effect = f"then the audit failed: {self.problem}"
        if self.problem is None:
            effect = f"their R@1 is {self.recall_with_help:.1f} with help, {self.recall_without_help:.1f} without"
        leaks = abbreviated(self.leaks, separator="; ")
        return f"LEAKAGE found by the audit on {self.videos} videos: {leaks}; {effect}"


NOT_AUDITED = "Leakage: not audited; run `tvr audit`, or set evaluation.audit and test again"
