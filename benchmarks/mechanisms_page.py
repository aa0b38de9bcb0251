"""Verdicts of `mechanisms.py` as data, and the page with its figures, created only from these data."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import yaml
from matplotlib.axes import Axes
from mechanisms_heads import TEXT_TO_VIDEO, VIDEO_TO_TEXT
from mechanisms_settings import BATCH, DIMENSION, FRAMES, SETTINGS, TEST, VALIDATION, WORDS
from scipy import stats

from tvr_lightning.evaluation.statistics import holm
from tvr_lightning.reproduce.report.drawing import COLORS, drawings, in_style, new_panels

Data = dict[str, Any]
DIRECTIONS = {TEXT_TO_VIDEO: "text to video", VIDEO_TO_TEXT: "video to text"}
BETTER, WORSE = "better because of the factor", "worse because of the factor"
ANYWAY, NOT_SEEN = "not shown to come from the factor", "no difference seen"
LEVEL = 0.05
TEXT = yaml.safe_load(Path(__file__).with_name("mechanisms_remarks.yaml").read_text(encoding="utf-8"))


def estimate(values: Sequence[float]) -> Data:
    """Return the mean of at least two values, one per seed, and half the width of its 95 % t interval."""
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {"mean": fmean(values), "half_width": half}


def p_value(values: Sequence[float], side: Literal["greater", "less"]) -> float:
    """Return the one-sided p-value of Student's t test that the mean is not above (or not below) zero."""
    if np.ptp(values) == 0:
        return 0.0 if values[0] != 0 and (values[0] > 0) == (side == "greater") else 1.0
    return float(stats.ttest_1samp(values, 0, alternative=side).pvalue)


def verdict(better: float, worse: float, effect: Data) -> str:
    """Return the verdict on a claim from the corrected p-values of both signs and the effect of its method."""
    if min(better, worse) <= LEVEL:
        return BETTER if better < worse else WORSE
    return ANYWAY if abs(effect["mean"]) > effect["half_width"] else NOT_SEEN


def summary(claims: Sequence[Data], deviations: Sequence[Data], leaks: int) -> Data:
    """Add differences, p-values, and verdicts to claims and deviations; the first `leaks` deviations are protocols."""
    for claim in claims:
        baseline, *others = claim["arms"]
        for arm in others:
            for direction in DIRECTIONS:
                by_seed = differences(arm, baseline, direction)
                rise = [there - control for there, control in zip(by_seed[-1], by_seed[0], strict=True)]
                arm[f"{direction}_differences"] = [estimate(values) for values in by_seed]
                arm[f"{direction}_rise"] = estimate(rise)
                arm[f"{direction}_p"] = [
                    max(p_value(by_seed[-1], side), p_value(rise, side)) for side in ("greater", "less")
                ]
    methods = [claim["arms"][1] for claim in claims]
    p_values = holm([p for arm in methods for p in arm[f"{TEXT_TO_VIDEO}_p"]])
    for claim, arm, *corrected in zip(claims, methods, p_values[::2], p_values[1::2], strict=True):
        effect = arm[f"{TEXT_TO_VIDEO}_differences"][-1]
        claim |= {"p_corrected": min(corrected), "verdict": verdict(*corrected, effect)}
    effects = []
    for item in deviations:
        ours, other = item["arms"]
        changes = differences(other, ours, TEXT_TO_VIDEO)[0]
        world = f"{item['world']}, strength {item['points'][0]:g}"
        about = {"method": item["paper"], "topic": item["key"], "world": world, "name": other["name"]}
        effects.append({**about, **estimate(changes), "seeds": len(changes), "by_seed": changes})
    return {"claims": list(claims), "leaks": effects[:leaks], "deviations": effects[leaks:]}


def differences(arm: Data, baseline: Data, direction: str) -> list[list[float]]:
    """Return R@1 of an arm minus that of the baseline, by point and seed."""
    return [
        [ours[direction] - theirs[direction] for ours, theirs in zip(*runs, strict=True)]
        for runs in zip(arm["runs"], baseline["runs"], strict=True)
    ]


def interval(found: Data) -> str:
    """Return an estimate as `+12.3 [+10.1, +14.5]`."""
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(found["mean"] + side * found["half_width"] for side in (0, -1, 1)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def write_page(data: Data, folder: Path) -> None:
    """Write mechanisms.md, and a figure per claim in mechanisms/."""
    (folder / "mechanisms").mkdir(parents=True, exist_ok=True)
    for claim in data["claims"]:
        for side, image in zip(("recall", "difference"), draw(claim), strict=True):
            (folder / "mechanisms" / f"{_name(claim)}-{side}.svg").write_bytes(image)
    (folder / "mechanisms.md").write_text(page(data), encoding="utf-8")


def page(data: Data) -> str:
    """Return the page as Markdown."""
    about = data["about"]
    verdicts = [
        (claim["paper"], f"[{claim['key']}](#{_name(claim)})", f"**{claim['verdict']}**", claim["arms"][1]["name"],
         interval(claim["arms"][1][f"{TEXT_TO_VIDEO}_differences"][-1]),
         interval(claim["arms"][1][f"{TEXT_TO_VIDEO}_rise"]), f"{claim['p_corrected']:.2g}")
        for claim in data["claims"]
    ]  # fmt: skip
    effects = [
        (item["method"], item["topic"], item["name"], item["world"], interval(item))
        for item in (*data["leaks"], *data["deviations"])
    ]
    settings = ", ".join(f"{rate:g} with {steps} steps" for rate, steps in about["settings"])
    parts = [
        f"""# Controlled experiments of the papers' mechanisms

`{about["command"]}`, {about["date"]}, {about["machine"]}: {about["heads"]} heads, {about["minutes"]:.0f} minutes of
CPU time. Settings, heads, and claims are those of commit {" and ".join(about["commits"])}. All numbers are in
`mechanisms.json`, by seed; `--page` writes this page from it.

{TEXT["history"]}
## Method

Each paper names a factor and claims that its method handles it. Here, small heads are trained on synthetic features
that contain this factor at several strengths; strength 0 is the control. There are {TRAIN} training pairs (1,024 in the
settings of false negatives), {VALIDATION} validation pairs, and {TEST} test pairs, with {FRAMES} frames and
{WORDS} words each, in batches of {BATCH}. A linear map per modality, which starts as the identity, replaces the encoder
and is trained with the head.

Every arm is trained with seed 0 at each of these settings: {settings}. At the control and at the strongest factor, it
uses the one with the best text-to-video R@1 on the validation pairs, with {about["seeds"]} seeds. Method and baseline
have the same data and seeds, and each has its own best setting.

R@1 is in percent, the mean over seeds; brackets are 95 % t intervals of differences paired by seed. The verdict is
about text to video at the strongest factor. The p-value is the larger one of two one-sided t tests, that the method is
not better (or not worse) than the baseline, and that the difference is not larger than in the control, corrected for
both signs of {len(data["claims"])} claims (Holm).

- **{BETTER}** or **{WORSE}**: p at most {LEVEL}.
- **{ANYWAY}**: the interval excludes zero, but the difference is not larger than in the control after the correction.
- **{NOT_SEEN}**: the interval includes zero.

**Scope.** A verdict is about this setting only: synthetic features of {DIMENSION} dimensions, a few hundred training
pairs, and, unless a claim states otherwise, maps that learn as fast as the head. The papers train encoders on many more
pairs and up to a thousand times more slowly than the head, which can change a verdict, as the two settings of GARE's
gap show. Arms that no paper has, such as bare texts, are diagnostics. No baseline has the capacity of the method
without its idea, so that a better method does not prove that its idea is the reason. Nothing here is evidence about
published results.

{table(("paper", "claim", "verdict", "arm", "difference", "more than in the control", "p"), verdicts)}
""",
        *map(_section, data["claims"]),
    ]
    if effects:
        listed = table(("method", "deviation", "variant", "setting", "difference"), effects)
        says = "Text-to-video R@1 of the variant minus that of this package, each with its best setting."
        parts.append(f"## Effects of deviations\n\n{says}\n\n{listed}\n")
    return "\n".join(parts)


def _name(claim: Data) -> str:
    return f"{claim['paper']}-{claim['key']}".lower().replace(",", "").replace(" ", "-")


def _section(claim: Data) -> str:
    points = ["0, control" if point == 0 else f"{point:g}" for point in claim["points"]]
    recalls = [
        (arm["name"], *(f"{fmean(run[TEXT_TO_VIDEO] for run in runs):.1f}" for runs in arm["runs"]))
        for arm in claim["arms"]
    ]
    rows = [
        (arm["name"], words, interval(arm[f"{direction}_differences"][-1]), interval(arm[f"{direction}_rise"]),
         f"{min(arm[f'{direction}_p']):.2g}")
        for arm in claim["arms"][1:] for direction, words in DIRECTIONS.items()
    ]  # fmt: skip
    sweep = [
        (arm["name"], *(f"{value:.1f}" for value in arm["sweep"]),
         *(f"{rate:g}, {steps}" for rate, steps in (arm["settings"][0], arm["settings"][-1])))
        for arm in claim["arms"]
    ]  # fmt: skip
    world = " ".join((inspect.getdoc(WORLDS[claim["world"]]) or "").split())
    ratio = "" if claim["ratio"] == 1 else f" The maps' learning rate is {claim['ratio']:g} of the head's."
    found = {arm["name"]: fmean(run[f"{TEXT_TO_VIDEO}_error"] for run in arm["runs"][-1]) for arm in claim["arms"]}
    errors = "; ".join(f"{name} {error:.3f}" for name, error in found.items())
    normalization = f"\nNormalization errors (NCL, Eq. 5) at the strongest factor: {errors}.\n"
    settings = [f"{rate:g}, {steps}" for rate, steps in claim["swept"]]
    return f"""<a id="{_name(claim)}"></a>

## {claim["paper"]}: {claim["key"]}

Claim: {claim["says"]}

Setting "{claim["world"]}": {world}{ratio}

![Text-to-video R@1 of each arm by strength](mechanisms/{_name(claim)}-recall.svg)
![Difference to the baseline by strength](mechanisms/{_name(claim)}-difference.svg)

{table(("text-to-video R@1 by strength", *points), recalls)}

{table(("arm", "direction", "difference at the strongest factor", "more than in the control", "p"), rows)}

{TEXT["remarks"][claim["key"]]}

Validation R@1 at the strongest factor by learning rate and steps, with one seed, and the chosen settings:

{table(("arm", *settings, "control", "strongest"), sweep)}
{normalization if claim["paper"] == "NCL" else ""}"""


@in_style()
def draw(claim: Data) -> list[bytes]:
    """Return the text-to-video R@1 of all arms, and their differences to the baseline, over the strengths as SVG."""
    left, right = axes = new_panels(2, height=3.2, layout="constrained")
    for color, arm in zip(COLORS, claim["arms"], strict=False):
        recalls = [estimate([run[TEXT_TO_VIDEO] for run in runs]) for runs in arm["runs"]]
        _line(left, recalls, color, arm["name"])
        _line(right, arm.get(f"{TEXT_TO_VIDEO}_differences", [{"mean": 0.0, "half_width": 0.0}] * len(recalls)), color)
    for axis, title in ((left, "R@1, text to video"), (right, "difference to the baseline")):
        axis.set_xticks(range(len(claim["points"])), [f"{point:g}" for point in claim["points"]])
        axis.set(title=title, xlabel="strength")
    left.figure.legend(loc="outside lower left")
    return [image.content for image in drawings(axes, "")]


def _line(axis: Axes, found: Sequence[Data], color: str, name: str | None = None) -> None:
    means, errors = [each["mean"] for each in found], [each["half_width"] for each in found]
    axis.errorbar(range(len(found)), means, errors, color=color, label=name, marker="o", markersize=3, linewidth=1.2)
