"""Verdicts of `mechanisms.py` as data, and the page with its figures, created only from these data."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import yaml
from mechanisms_claims import FULL_RATE
from mechanisms_heads import TEXT_TO_VIDEO, VIDEO_TO_TEXT
from mechanisms_settings import BATCH, DIMENSION, FRAMES, SETTINGS, TEST, VALIDATION, WORDS
from scipy import stats

from tvr_lightning.evaluation.statistics import holm
from tvr_lightning.reproduce.report.drawing import COLORS, drawings, in_style, new_panels

Data = dict[str, Any]
Side = Literal["greater", "less"]
SIDES: tuple[Side, Side] = ("greater", "less")
DIRECTIONS = {TEXT_TO_VIDEO: "text to video", VIDEO_TO_TEXT: "video to text"}
BETTER, WORSE = "better in this setting because of the factor", "worse in this setting because of the factor"
UNSPECIFIC, ANYWAY = "not specific to the mechanism", "different, but the cause is not shown"
NOT_SEEN, NOT_RUN, REFUSED = "no difference seen", "not run yet", "no verdict"
SHORT = {BETTER: "better", WORSE: "worse", UNSPECIFIC: "not specific", ANYWAY: "cause not shown", NOT_SEEN: "none seen"}
LEVEL = 0.05
SECTION = ("paper", "key", "setting")
TEXT = yaml.safe_load(Path(__file__).with_name("mechanisms_remarks.yaml").read_text(encoding="utf-8"))


def estimate(values: Sequence[float]) -> Data:
    """Return the mean of at least two values, one per seed, and half the width of its 95 % t interval."""
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {"mean": fmean(values), "half_width": half}


def p_value(values: Sequence[float], side: Side) -> float:
    """Return the one-sided p-value of Student's t test that the mean is not above (or not below) zero."""
    if np.ptp(values) == 0:
        return 0.0 if values[0] != 0 and (values[0] > 0) == (side == "greater") else 1.0
    return float(stats.ttest_1samp(values, 0, alternative=side).pvalue)


def summary(claims: Sequence[Data], deviations: Sequence[Data]) -> Data:
    """Add effects and verdicts to claims and deviations.

    Two families of p-values are corrected with Holm's method, over all claims, both directions, and both signs: that
    the method differs from the baseline, and more than without the factor (`factor`); and that it also differs from
    every control (`specific`). A claim that has not been run counts with p-values of 1.
    """
    tests = [_tested(claim, direction) for claim in claims for direction in DIRECTIONS]
    for name in ("factor", "specific"):
        corrected = holm([p for test in tests for p in test[f"p_{name}"]])
        for test, *both in zip(tests, corrected[::2], corrected[1::2], strict=True):
            test[f"p_{name}"] = both
    for number, claim in enumerate(claims):
        claim["tests"] = dict(zip(DIRECTIONS, tests[2 * number : 2 * number + 2], strict=True))
        for test in claim["tests"].values():
            test["verdict"] = REFUSED if claim["refused"] else verdict(test)
    found: Data = {"claims": list(claims), "leaks": [], "deviations": []}
    for item in deviations:
        ours, other = item["arms"]
        changes = differences(other, ours, TEXT_TO_VIDEO)[0]
        if len(changes) > 1 and not item["refused"]:
            about = {"method": item["paper"], "topic": item["key"], "name": other["name"]}
            about["setting"] = f"{item['setting']}, strength {item['points'][0]:g}"
            effect = {**about, **estimate(changes), "seeds": len(changes), "by_seed": changes}
            found["leaks" if item["key"] == "protocol" else "deviations"].append(effect)
    return found


def _tested(claim: Data, direction: str) -> Data:
    """Return the effect of the method, its rise over the control strength, and uncorrected p-values of both signs."""
    baseline, method, *others = claim["arms"]
    controls = [arm for arm in others if arm["role"] == "control"]
    effect, compared = (
        differences(method, baseline, direction),
        [differences(method, arm, direction) for arm in controls],
    )
    seeds = min(len(effect[0]), len(effect[-1]))
    if seeds < 2 or claim["refused"]:
        return {"seeds": seeds, "p_factor": [1.0, 1.0], "p_specific": [1.0, 1.0]}
    strongest = effect[-1]
    rise = [there - here for there, here in zip(strongest[:seeds], effect[0][:seeds], strict=True)]
    factor = [max(p_value(strongest, side), p_value(rise, side)) for side in SIDES]
    specific = [max(p, *(p_value(each[-1], side) for each in compared)) for p, side in zip(factor, SIDES, strict=True)]
    return {
        "seeds": seeds,
        "baseline": [fmean(run[direction] for run in baseline["runs"][end]) for end in (0, -1)],
        "effect": estimate(strongest),
        "rise": estimate(rise),
        "over_controls": {arm["name"]: estimate(each[-1]) for arm, each in zip(controls, compared, strict=True)},
        "p_factor": factor,
        "p_specific": specific,
    }


def verdict(test: Data) -> str:
    """Return the verdict of a test from its corrected p-values of both signs and its effect."""
    if "effect" not in test:
        return NOT_RUN
    better, worse = test["p_specific"]
    if min(better, worse) <= LEVEL:
        return BETTER if better < worse else WORSE
    if min(test["p_factor"]) <= LEVEL:
        return UNSPECIFIC
    return ANYWAY if abs(test["effect"]["mean"]) > test["effect"]["half_width"] else NOT_SEEN


def differences(arm: Data, baseline: Data, direction: str) -> list[list[float]]:
    """Return R@1 of an arm minus that of the baseline, by point and seed."""
    return [
        [ours[direction] - theirs[direction] for ours, theirs in zip(*runs, strict=True)]
        for runs in zip(arm["runs"], baseline["runs"], strict=True)
    ]


def interval(found: Data) -> str:
    """Return an estimate as `+12.3 [+10.1, +14.5]`."""
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(found["mean"] + side * found["half_width"] for side in (0, -1, 1)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def write_page(data: Data, folder: Path) -> None:
    """Write mechanisms.md, and a figure per claim in mechanisms/."""
    figures = folder / "mechanisms"
    figures.mkdir(parents=True, exist_ok=True)
    for old in figures.glob("*.svg"):
        old.unlink()
    for claim in data["claims"]:
        if _has_curve(claim):
            (figures / _figure(claim)).write_bytes(draw(claim))
    (folder / "mechanisms.md").write_text(page(data), encoding="utf-8")


def page(data: Data) -> str:
    """Return the page as Markdown."""
    about, tests = data["about"], [test for claim in data["claims"] for test in claim["tests"].values()]
    seeds = sorted({test["seeds"] for test in tests if "effect" in test}) or [0]
    ran = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    effects = [
        (item["method"], item["topic"], item["name"], item["setting"], interval(item), str(item["seeds"]))
        for item in (*data["leaks"], *data["deviations"])
    ]
    between = {len(runs) for claim in data["claims"] for arm in claim["arms"] for runs in arm["runs"][1:-1]}
    head = ("claim", "rate of the maps", "paper: t to v", "paper: v to t", "released: t to v", "released: v to t")
    facts = {
        "ran": ran,
        "rows": len(data["claims"]),
        "table": table(head, map(_row, _grouped(data["claims"], *SECTION, "maps"))),
        "between": " or ".join(map(str, sorted(between))),
        "commit": ", ".join(about["commits"]),
        "sizes": f"{VALIDATION} validation pairs, and {TEST} test pairs",
        "features": f"{DIMENSION}-dimensional features, with {FRAMES} frames and {WORDS} words each",
        "batch": BATCH,
        "full_rate": FULL_RATE,
    }
    parts = [TEXT["start"].format(**about, **facts), *map(_section, _grouped(data["claims"], *SECTION))]
    if effects:
        listed = table(("method", "deviation", "variant", "setting", "difference", "seeds"), effects)
        parts.append(TEXT["deviations"].format(table=listed))
    return "\n".join([*parts, TEXT["earlier"]])


def _grouped(claims: Sequence[Data], *names: str) -> Iterable[list[Data]]:
    return (list(group) for _, group in groupby(claims, lambda claim: tuple(claim[name] for name in names)))


def _row(claims: Sequence[Data]) -> list[str]:
    claim, by_variant = claims[0], {each["variant"] or "paper": each["tests"].values() for each in claims}
    cells = [_cell(test) for name in ("paper", "released") for test in by_variant.get(name, ())]
    link = f"[{claim['paper']}, {_title(claim)}](#{_anchor(claim)})"
    return [link, f"{claim['maps']:g}", *cells, *[""] * (4 - len(cells))]


def _cell(test: Data) -> str:
    if "effect" not in test:
        return str(test["verdict"])
    bold = "**" if test["verdict"] in (BETTER, WORSE) else ""
    return f"{bold}{SHORT[test['verdict']]}{bold} {test['effect']['mean']:+.1f}"


def _title(claim: Data) -> str:
    return f"{claim['key']} ({claim['setting']})" if claim["key"] == "decorrelation" else claim["key"]


def _anchor(claim: Data) -> str:
    return f"{claim['paper']}-{_title(claim)}".lower().translate(str.maketrans(" ", "-", ",()"))


def _figure(claim: Data) -> str:
    return f"{_anchor(claim)}-{claim['maps']:g}{'-' * bool(claim['variant'])}{claim['variant']}.svg"


def _named(claim: Data) -> str:
    variant = {"paper": "As in the paper", "released": "As released", "": "Method"}[claim["variant"]]
    return f"{variant}, maps at {claim['maps']:g}"


def _has_curve(claim: Data) -> bool:
    return all(len(runs) > 1 for runs in (claim["arms"][0]["runs"][0], claim["arms"][0]["runs"][-1]))


def _section(claims: Sequence[Data]) -> str:
    claim = claims[0]
    about = TEXT["claims"][claim["key"]]
    setting = " ".join((inspect.getdoc(SETTINGS[claim["setting"]]) or "").split())
    rows = []
    for each in claims:
        for words, test in zip(DIRECTIONS.values(), each["tests"].values(), strict=True):
            cells = [""] * 5
            if "effect" in test:
                controls = "; ".join(f"{name} {interval(found)}" for name, found in test["over_controls"].items())
                p_values = "; ".join(f"{min(test[f'p_{name}']):.2g}" for name in ("factor", "specific"))
                baseline = "{:.1f}, {:.1f}".format(*test["baseline"])
                cells = [baseline, interval(test["effect"]), interval(test["rise"]), controls, p_values]
            rows.append([_named(each), words, *cells, each["refused"] or test["verdict"], str(test["seeds"])])
    head = (
        "variant", "direction", "baseline without and with the factor", "difference", "more than without the factor",
        "compared with", "p", "verdict", "seeds",
    )  # fmt: skip
    curves = "\n".join(
        f"![Text-to-video R@1 of each arm by strength, {_named(each)}](mechanisms/{_figure(each)})"
        for each in claims
        if _has_curve(each)
    )
    return f"""<a id="{_anchor(claim)}"></a>

## {claim["paper"]}: {_title(claim)}

> {about["quote"]}

({about["source"]}) {about["model"]}

Setting "{claim["setting"]}": {setting}

{table(head, rows)}

{about["remark"].strip() + chr(10) * 2 if about.get("remark") else ""}{curves}
"""


@in_style()
def draw(claim: Data) -> bytes:
    """Return the text-to-video R@1 of all arms over the strengths as SVG; bars span the seeds."""
    (axis,) = axes = new_panels(1, height=3.6, layout="constrained")
    for color, arm in zip(COLORS * 2, claim["arms"], strict=False):
        known = {place: [run[TEXT_TO_VIDEO] for run in runs] for place, runs in enumerate(arm["runs"]) if len(runs) > 1}
        means = np.array([fmean(values) for values in known.values()])
        ends = np.array([[min(values), max(values)] for values in known.values()]).T
        style = {"linestyle": ":", "linewidth": 1.0} if arm["role"] == "diagnostic" else {"linewidth": 1.2}
        axis.errorbar(
            list(known), means, abs(ends - means), color=color, label=arm["name"], marker="o", markersize=3, **style
        )
    axis.set_xticks(range(len(claim["points"])), [f"{point:g}" for point in claim["points"]])
    axis.set(
        title=f"{claim['paper']}, {_named(claim)[0].lower()}{_named(claim)[1:]}",
        xlabel="strength",
        ylabel="text-to-video R@1",
    )
    axis.figure.legend(loc="outside lower left")
    return drawings(axes, "")[0].content
