"""What the heads of `mechanisms.py` add up to: verdicts as data, and from the data alone the page and its figures."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from mechanisms_claims import LEAKS, Claim, Deviation, Job
from mechanisms_heads import LEARNING_RATE, TEXT_TO_VIDEO, VIDEO_TO_TEXT
from mechanisms_worlds import BATCH, FRAMES, TEST, TRAIN, WORDS, WORLDS
from scipy import stats

from tvr_lightning.reproduce.report.drawing import COLORS

Data = dict[str, Any]
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tvr",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.facecolor": "white",
}
Readings = dict[str, dict[str, float]]
DIRECTIONS = {TEXT_TO_VIDEO: "text to video", VIDEO_TO_TEXT: "video to text"}
FIELDS = (*DIRECTIONS, *(f"{direction}_error" for direction in DIRECTIONS))
SEEN, ANYWAY, NOT_SEEN, REVERSED = "seen", "not by the factor", "not seen", "reversed"


READ = {
    "conditioning": "Where one scene is all there is, both find the same. The more frames are untold, the more does "
    "pooling for the text find, until so few tell anything that both find little.",
    "contrasts": "As for X-Pool, and in the control conditioning costs a little.",
    "normalisation": "The biases at test do all of it, and are as good on a baseline that was trained without them: "
    "NCL's loss alone finds less than the plain loss. Video to text gains in the control as well, which is why the "
    "verdict is about text to video.",
    "gap": "GARE falls behind where there is no gap and overtakes as it grows. Its bare texts do not: they find the "
    "less, the wider the gap. What closes the gap is the increment, not an anchor that was relieved.",
    "gap-slow-encoders": "The bare texts find exactly as little as the baseline's.",
    "false-negatives": "Corrected texts lose several times as much by false negatives as the baseline does. Bare texts "
    "lose less by them, but begin lower, and never find more than the baseline. Video to text gains, as much in the "
    "control. Tried besides, with one seed and 3 false negatives: encoders at 1e-4 and 1e-5, the mean of the frames "
    "as pooling, the paper's weight of the bottleneck, no regularisation at all, and words as context; GARE stays "
    "below its baseline in each. With corrected videos in place of texts (Table 7) it was above it, by 6 points, which "
    "one seed cannot settle.",
    "paths": "Dividing the frames finds a point more in the control, and a few where captions leave most of a video "
    "untold. The divergence between the paths' scores and those of all frames adds nothing to that.",
    "perturbation": "The draws of the paper, which are centred, find more than those of the released code.",
    "decorrelation": "On logits the term is ten thousand times as large as on cosines and outweighs InfoNCE: it makes "
    "the contrasts agree by making them say nothing. On cosines, as the paper has it, it is too small to do anything.",
    "sound": "A gate that knows nothing of the text finds as much: that the query opens it does not matter here.",
    "balance": "Where all contrasts are equally good, LSA costs a little.",
    "false-negatives-of-a-style": "False negatives do cost the baseline here, and cost GARE more: it begins above the "
    "baseline and ends below.",
}
"""What there is to see and what was tried, by claim: written after the run."""


def estimate(values: Sequence[float]) -> Data:
    """Return the mean of values, one per seed, and the half width of its 95 % t interval.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} seeds; an interval takes at least 2")
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {"mean": fmean(values), "half_width": half}


def verdict(effect: Data, rise: Data) -> str:
    """Return what a difference to the baseline, and how much more it is than in the control, say of a claim."""
    if effect["mean"] < -effect["half_width"]:
        return REVERSED
    if effect["mean"] <= effect["half_width"]:
        return NOT_SEEN
    return SEEN if rise["mean"] > rise["half_width"] else ANYWAY


def summary(
    claims: Sequence[Claim], deviations: Sequence[Deviation], seeds: int, readings: Callable[[Job], Readings]
) -> Data:
    """Return, as plain data, all results by seed, and the verdicts and effects that follow from them."""
    return {
        "claims": [_claim(claim, seeds, readings) for claim in claims],
        "leaks": [_deviation(item, seeds, readings) for item in deviations if item in LEAKS],
        "deviations": [_deviation(item, seeds, readings) for item in deviations if item not in LEAKS],
    }


def _claim(claim: Claim, seeds: int, readings: Callable[[Job], Readings]) -> Data:
    arms = []
    for arm in claim.arms:
        found = [[readings(claim.job(arm, point, s))[arm.reading] for s in range(seeds)] for point in claim.points]
        arms.append({"name": arm.name, **{field: [[run[field] for run in runs] for runs in found] for field in FIELDS}})
    named = ("key", "paper", "says", "refuted_if", "world", "axis", "fixed", "encoder_rate", "remarks")
    about = {name: getattr(claim, name) for name in named}
    return {**about, "points": list(claim.points), "judged": claim.verdict_at, "arms": arms, "results": results(
        {"points": list(claim.points), "judged": claim.verdict_at, "arms": arms}
    )}  # fmt: skip


def results(claim: Data) -> list[Data]:
    """Return what the figures of a claim's arms say, for every arm but the baseline and both directions.

    Returns:
        `differences` to the baseline at every point; the `effect` is that at the point of the verdict, the `rise` how
        much more it is than in the control; and the `verdict`.
    """
    judged, (baseline, *others) = claim["points"].index(claim["judged"]), claim["arms"]
    found = []
    for arm in others:
        for direction in DIRECTIONS:
            by_seed = [
                [ours - theirs for ours, theirs in zip(*runs, strict=True)]
                for runs in zip(arm[direction], baseline[direction], strict=True)
            ]
            rise = estimate([there - control for there, control in zip(by_seed[judged], by_seed[0], strict=True)])
            differences = [estimate(values) for values in by_seed]
            found.append(
                {
                    "arm": arm["name"],
                    "direction": direction,
                    "differences": differences,
                    "effect": differences[judged],
                    "rise": rise,
                    "verdict": verdict(differences[judged], rise),
                }
            )
    return found


def _deviation(item: Deviation, seeds: int, readings: Callable[[Job], Readings]) -> Data:
    changes = []
    for seed in range(seeds):
        ours, other = item.jobs(seed)
        theirs = readings(other)[item.other.reading][TEXT_TO_VIDEO]
        changes.append(theirs - readings(ours)[item.ours.reading][TEXT_TO_VIDEO])
    world = f"{ours.world}, strength {ours.strength:g}"
    about = {"method": item.method, "topic": item.topic, "world": world, "name": item.other.name}
    return {**about, **estimate(changes), "seeds": seeds, "by_seed": changes}


def interval(found: Data) -> str:
    """Return an estimate as `+12.3 [+10.1, +14.5]`."""
    mean, half = found["mean"], found["half_width"]
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


def write_page(data: Data, folder: Path) -> None:
    """Write mechanisms.md and a figure for every claim in mechanisms/ below a folder."""
    figures = folder / "mechanisms"
    figures.mkdir(parents=True, exist_ok=True)
    for claim in data["claims"]:
        draw(claim, figures / f"{claim['key']}.svg")
    (folder / "mechanisms.md").write_text(page(data), encoding="utf-8")


def page(data: Data) -> str:
    """Return the page in markdown."""
    parts = [_head(data), *(_section(claim) for claim in data["claims"])]
    if data["leaks"] or data["deviations"]:
        parts.append(_deviations(data))
    shown = dict.fromkeys(claim["world"] for claim in data["claims"])
    parts.append(
        "## The worlds as code\n\nFrom `benchmarks/mechanisms_worlds.py`, which has the parts that they share.\n"
    )
    parts += [f"### {name.capitalize()}\n\n```python\n{inspect.getsource(WORLDS[name])}```\n" for name in shown]
    return "\n".join(parts)


def _head(data: Data) -> str:
    about = data["about"]
    lines = [
        "| paper | claim | verdict, text to video | difference | more than in the control |",
        "|---|---|---|---|---|",
    ]
    for claim in data["claims"]:
        found = claim["results"][0]
        cells = [
            claim["paper"], f"[{claim['key']}](#{_anchor(claim)})", f"**{found['verdict']}**",
            interval(found["effect"]), interval(found["rise"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    absent = f" Not finished: {'; '.join(about['missing'])}." if about["missing"] else ""
    return f"""# What the mechanisms do in controlled worlds

`{about["command"]}`, {about["date"]}, {about["machine"]}; {about["heads"]} heads from {about["seeds"]} seeds each,
{about["minutes"]:.0f} minutes of processor time. Worlds, heads and claims were fixed before training, in
{" and ".join(f"commit {commit}" for commit in about["settings"])}.
Every figure and verdict below is in `mechanisms.json`, by seed; `--page` writes this page from it again.{absent}

Every paper names a factor, and claims that its method deals with it. Here small heads are trained on made-up features
in which this factor is there at several strengths, and at strength 0 not at all: the control. Vectors are about as long
as CLIP's and lie in a cone of their modality. {TRAIN} training pairs (1024 in the worlds of false negatives), {TEST}
test pairs, {FRAMES} frames, {WORDS} words, {about["steps"]} steps with batches of {BATCH}, AdamW at {LEARNING_RATE:g},
CLIP's temperature. A linear map per modality, which starts as the identity, trains with each head in place of the
encoders. Method and baseline share data, seeds and settings, and nothing was tuned for a method: strengths, noise and
rates were chosen in pilots of one seed so that baselines start neither at chance nor at 100. Such worlds show what a
mechanism can do, not how much it does on real videos.

R@1 in percent, means over seeds; brackets are 95 % t intervals of differences paired by seed. What the verdicts say:

- **{SEEN}**: with the factor the method finds more than its baseline, and more so than in the control;
- **{ANYWAY}**: it finds more, but as much so in the control;
- **{NOT_SEEN}**: the interval of the difference holds 0;
- **{REVERSED}**: the method finds less.

{chr(10).join(lines)}
"""


def _anchor(claim: Data) -> str:
    return f"{claim['paper']}-{claim['key']}".lower()


def _section(claim: Data) -> str:
    world = inspect.getdoc(WORLDS[claim["world"]]) or ""
    at = "" if claim["fixed"] is None else f" Here at strength {claim['fixed']:g}."
    figures = [_results_line(found) for found in claim["results"]]
    rate = f"The maps in place of the encoders train at {claim['encoder_rate']:g}."
    return f"""<a id="{_anchor(claim)}"></a>

## {claim["paper"]}: {claim["key"].replace("-", " ")}

Claim: {claim["says"]}. Refuted, if {claim["refuted_if"]}. Judged at {claim["judged"]:g}, text to video.

World "{claim["world"]}": {" ".join(world.split())}{at} {rate} {claim["remarks"]}

![{_told(claim)}](mechanisms/{claim["key"]}.svg)

{_table(claim)}

{READ.get(claim["key"], "")}

| arm | direction | verdict | difference at {claim["judged"]:g} | more than in the control |
|---|---|---|---|---|
{chr(10).join(figures)}
{_errors(claim)}"""


def _results_line(found: Data) -> str:
    cells = (found["arm"], DIRECTIONS[found["direction"]], found["verdict"], interval(found["effect"]))
    return f"| {' | '.join(cells)} | {interval(found['rise'])} |"


def _table(claim: Data) -> str:
    heads = " | ".join("0, control" if point == 0 else f"{point:g}" for point in claim["points"])
    lines = [f"| R@1, text to video; {claim['axis']} | {heads} |", "|---" * (len(claim["points"]) + 1) + "|"]
    for arm in claim["arms"]:
        cells = [f"{fmean(values):.1f}" for values in arm[TEXT_TO_VIDEO]]
        lines.append(f"| {arm['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _errors(claim: Data) -> str:
    """Return NCL's normalisation errors where the claim is NCL's."""
    if claim["paper"] != "NCL":
        return ""
    judged = claim["points"].index(claim["judged"])
    said = "; ".join(f"{arm['name']} {fmean(arm[f'{TEXT_TO_VIDEO}_error'][judged]):.3f}" for arm in claim["arms"])
    return f"\nNormalisation errors (NCL, Eq. 5) at {claim['judged']:g}, text to video: {said}.\n"


def _told(claim: Data) -> str:
    """Return what a reader who cannot see the figure is told."""
    said = []
    for arm in claim["arms"]:
        first, last = fmean(arm[TEXT_TO_VIDEO][0]), fmean(arm[TEXT_TO_VIDEO][-1])
        said.append(f"{arm['name']} from {first:.1f} to {last:.1f}")
    return f"R@1 over {claim['axis']}, {claim['points'][0]:g} to {claim['points'][-1]:g}: {'; '.join(said)}"


def draw(claim: Data, file: Path) -> None:
    """Draw R@1 of all arms, and their differences to the baseline with intervals, over the points of a claim."""
    arms = claim["arms"]
    with matplotlib.rc_context(_STYLE):
        height = 3.1 + 0.2 * math.ceil(len(arms) / 2)
        figure = Figure(figsize=(8.4, height))
        left, right = figure.subplots(1, 2)
        for place, (colour, arm) in enumerate(zip(COLORS, arms, strict=False)):
            aside = 0.07 * (place - (len(arms) - 1) / 2)  # intervals of several arms then do not hide each other
            _line(left, aside, [estimate(values) for values in arm[TEXT_TO_VIDEO]], colour, arm["name"])
            for result in claim["results"]:
                if result["arm"] == arm["name"] and result["direction"] == TEXT_TO_VIDEO:
                    _line(right, aside, result["differences"], colour)
        right.axhline(0, color=COLORS[0], linewidth=1)
        left.set_ylim(max(left.get_ylim()[0], 0), min(left.get_ylim()[1], 101))
        left.set_title("R@1, text to video", loc="left")
        right.set_title("difference to the baseline", loc="left")
        for axes in (left, right):
            axes.set_xticks(range(len(claim["points"])), [f"{point:g}" for point in claim["points"]])
            axes.set_xlabel(claim["axis"])
        figure.subplots_adjust(left=0.06, right=0.99, bottom=1 - 2.45 / height, top=1 - 0.25 / height, wspace=0.14)
        figure.legend(loc="lower center", ncols=2)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def _line(axes: Axes, aside: float, found: Sequence[Data], colour: str, name: str | None = None) -> None:
    places = [place + aside for place in range(len(found))]
    low, high = ([each["mean"] + side * each["half_width"] for each in found] for side in (-1, 1))
    axes.vlines(places, low, high, color=colour, linewidth=1.2)
    means = [each["mean"] for each in found]
    axes.plot(places, means, color=colour, label=name, marker="o", markersize=3, linewidth=1.2)


def _deviations(data: Data) -> str:
    lines = [
        "## What deviations change\n",
        "R@1 from text to video of the other reading minus ours, as `docs/deviations.md` quotes it.\n",
        "| method | deviation | reading | world | difference |",
        "|---|---|---|---|---|",
    ]
    for item in (*data["leaks"], *data["deviations"]):
        cells = (item["method"], item["topic"], item["name"], item["world"], interval(item))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
