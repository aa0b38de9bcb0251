"""What the records of `mechanisms.py` add up to: a summary as data, and the page."""

from __future__ import annotations

from typing import Any

from mechanisms_arms import DEVIATIONS, EXPERIMENTS, LEAKING
from mechanisms_statistics import Estimate, estimate
from mechanisms_training import EPOCHS, LEARNING_RATE
from mechanisms_worlds import BATCH, FRAMES, TEST, TRAIN, WORDS, WORLDS

Record = dict[str, Any]
Values = dict[int, float]


def values(records: list[Record], world: str, factor: bool, arm: str, field: str) -> Values:
    """Return a field of one arm's records by seed."""
    return {
        record["seed"]: record[field]
        for record in records
        if (record["world"], record["factor"], record["arm"]) == (world, factor, arm) and record[field] is not None
    }


def difference(first: Values, second: Values) -> Values:
    """Return first minus second for the seeds that both have."""
    return {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}


def _plain(name: str, values: Values) -> dict[str, float | int | str | None]:
    found = estimate(list(values.values()))
    return {"name": name, "mean": found.mean, "half_width": found.half, "seeds": len(values)}


def summary(records: list[Record]) -> dict[str, list[dict[str, Any]]]:
    """Return, as plain data, the measured effect of each deviation and of each protocol that leaks.

    Returns:
        `deviations` and `leaks`: method, topic, world, name of the reading, mean and half width of the 95 % interval of
        its R@1 (text to video) minus ours, and the number of seeds.
    """
    found: dict[str, list[dict[str, Any]]] = {"deviations": [], "leaks": []}
    for item in DEVIATIONS:
        ours = values(records, item.world, True, item.ours.name, "text_to_video")
        changed = difference(values(records, item.world, True, item.other.name, "text_to_video"), ours)
        if changed:
            about = {"method": item.method, "topic": item.topic, "world": item.world}
            found["deviations"].append({**about, **_plain(item.other.name, changed)})
    for method, world, arm in LEAKING:
        asked = values(records, world, True, arm.name, "text_to_video")
        leaked = difference(values(records, world, True, arm.name, "released"), asked)
        if leaked:
            about = {"method": method, "topic": "protocol", "world": world}
            found["leaks"].append({**about, **_plain("the released protocol, same weights", leaked)})
    return found


def page(
    records: list[Record], found: dict[str, list[dict[str, Any]]], command: str, machine: str, missing: int = 0
) -> str:
    """Return the results page in markdown.

    Args:
        records: one per trained head.
        found: their `summary`.
        command, machine: what made them, and where.
        missing: heads that the command would train and that have no record.
    """
    parts = [_head(records, command, machine, missing)]
    for experiment in EXPERIMENTS:
        part = _experiment(records, experiment.key)
        if part:
            parts.append(part)
    if found["deviations"] or found["leaks"]:
        parts.append(_deviations(found))
    return "\n".join(parts)


def _head(records: list[Record], command: str, machine: str, missing: int) -> str:
    minutes = sum(record["seconds"] for record in records) / 60
    absent = f" {missing} heads of the whole run are still missing." if missing else ""
    return f"""# What the mechanisms do in controlled worlds

`{command}`, {machine}; {len(records)} heads, {minutes:.1f} minutes of processor time, one thread each.{absent}

Every experiment trains a method and its own baseline on synthetic features in which the factor that the paper claims to
address is there, and on a control in which it is not. {TRAIN} training pairs, {TEST} test pairs, {FRAMES} frames,
{WORDS} words, batches of {BATCH}, {EPOCHS} epochs, AdamW at {LEARNING_RATE:g}, CLIP's temperature; a linear map per
modality trains with each head in place of the encoders. Method and baseline share data, seeds and schedule. Nothing
was tuned for a method. Noise and the number of scenes were set once, after a pilot of one seed had shown baselines at
chance or near 100; sizes and epochs are what two cores can do.

Figures are R@1 in percent, means over seeds; brackets are 95 % t intervals over the seeds' paired differences.
"Appears": the interval of the difference with the factor lies above zero; "not seen": it holds zero; "reversed": below.
The last lines ask whether the factor makes the difference larger than in the control. Such worlds show what a mechanism
can do, not what it does on real videos.
"""


def _experiment(records: list[Record], key: str) -> str:
    experiment = next(item for item in EXPERIMENTS if item.key == key)
    fields = (("text_to_video", "text to video"), ("video_to_text", "video to text"))
    world, (baseline, method, *_) = experiment.world, experiment.arms
    needed = [(True, arm.name) for arm in experiment.arms] + [(False, arm.name) for arm in experiment.arms[:2]]
    seeds = set.intersection(*(set(values(records, world, *pair, "text_to_video")) for pair in needed))
    if not seeds:
        return ""
    records = [record for record in records if record["seed"] in seeds]  # a seed of which an arm is missing waits
    lines = [
        f"## {experiment.paper}: {experiment.key}\n",
        f"Claim: {experiment.claim}.\n",
        f"World: {(WORLDS[world].__doc__ or '').strip()} Seeds: {len(seeds)}.\n",
        "| | factor | text to video | difference | video to text | difference |",
        "|---|---|---|---|---|---|",
    ]
    for factor in (True, False):
        for arm in experiment.arms:
            cells = []
            for field, _ in fields:
                own = values(records, world, factor, arm.name, field)
                against = difference(own, values(records, world, factor, baseline.name, field))
                if own:
                    cells += [f"{estimate(list(own.values())).mean:.1f}"]
                    cells += ["" if arm is baseline else estimate(list(against.values())).text(sign=True)]
            if cells:
                lines.append(f"| {arm.name} | {'yes' if factor else 'control'} | {' | '.join(cells)} |")
    lines.append("")
    for field, direction in fields:
        with_factor, control = (
            difference(values(records, world, f, method.name, field), values(records, world, f, baseline.name, field))
            for f in (True, False)
        )
        effect, extra = estimate(list(with_factor.values())), estimate(list(difference(with_factor, control).values()))
        lines.append(
            f"- {direction.capitalize()}: **{effect.verdict}**, {effect.text(sign=True)}; more than in the control by "
            f"{extra.text(sign=True)} ({_grows(extra)})."
        )
    if key == "normalisation":
        lines += ["", _errors(records, world, [arm.name for arm in experiment.arms])]
    return "\n".join(lines) + "\n"


def _grows(extra: Estimate) -> str:
    return {
        "appears": "the factor matters",
        "not seen": "no difference seen",
        "reversed": "the factor makes it less",
    }.get(extra.verdict, extra.verdict)


def _errors(records: list[Record], world: str, arms: list[str]) -> str:
    """Return NCL's normalisation errors with hubs, text to video and video to text."""
    parts = []
    for arm in arms:
        errors = [
            estimate(list(values(records, world, True, arm, f"{direction}_error").values())).mean
            for direction in ("text_to_video", "video_to_text")
        ]
        parts.append(f"{arm} {errors[0]:.3f} and {errors[1]:.3f}")
    return f"Normalisation errors (NCL, Eq. 5) with hubs, text to video and video to text: {'; '.join(parts)}."


def _deviations(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "## What deviations change\n",
        "The same worlds with their factor; R@1 from text to video of the other reading minus ours, as the ledger\n"
        "(`docs/deviations.md`) quotes it.\n",
        "| method | deviation | reading | world | difference |",
        "|---|---|---|---|---|",
    ]
    for item in found["leaks"] + found["deviations"]:
        change = Estimate(item["mean"], item["half_width"])
        lines.append(
            f"| {item['method']} | {item['topic']} | {item['name']} | {item['world']} | {change.text(sign=True)} |"
        )
    return "\n".join(lines) + "\n"
