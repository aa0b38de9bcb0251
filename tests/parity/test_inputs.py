"""Inputs of the encoder, compared with those of the released loaders on real clips under each released rule."""

import hashlib
import itertools
import json
import math
from pathlib import Path

import av
import numpy as np
import pytest
from parity.training import RECIPES, recipe_of

from tvr_lightning.data import LSMDC, MSRVTT, MSVD, ActivityNet, DiDeMo
from tvr_lightning.data.loader import TrainingSampler
from tvr_lightning.data.records import read_lines
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.media import sampling, video
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import frames_at_rate

EXTREMES = {"lowest": "min", "highest": "max"}
PREPARATIONS = {"pil": Preparation(224), "no_antialias": Preparation(224, antialias=False)}
RULES = {
    "clip4clip": ("int-fps-uniform", None),
    "gare_drl": ("round-fps-uniform", None),
    "xpool_tmass_gaid": ("container-segments", None),
    "tmass_didemo_0_31": ("container-segments", (0.0, 31.0)),
}
"""Sampling and span of each rule."""


def clips_of(case, folder):
    """Return the recorded clips by file, those that are in the folder; skip if none is."""
    recorded = json.loads(case.read_text())["clips"]
    found = {folder / name: clip for name, clip in recorded.items() if (folder / name).is_file()}
    if not found:
        pytest.skip(f"{folder} contains none of the {len(recorded)} clips of {case.name}")
    return found


def times_at(path, places):
    """Seconds from the first frame of the frames at these places of a file read from its start."""
    with av.open(str(path)) as container:
        times = sorted(frame.time for frame in container.decode(video=0))
    return [times[place] - times[0] for place in places]


def report(case, compared, wrong):
    """Print what was compared, and fail in one line if something differs."""
    print(f"\n{case}: {len(wrong)} of {compared} differ", *wrong, sep="\n  ")
    if wrong or not compared:
        pytest.fail(f"{case}: {len(wrong)} of {compared} differ: {', '.join(wrong[:3])}", pytrace=False)


def timestamps_by_rule(path, monkeypatch):
    """Seconds of the frames that each rule selects; the file is decoded once for all of them."""
    rules = itertools.cycle(RULES.values())

    def sample(times, duration, frames, _, span, *rest):
        return sampling.sample_frames(times, duration, frames, next(rules)[0], span, *rest)

    monkeypatch.setattr(video, "sample_frames", sample)
    spans = [span for _, span in RULES.values()]
    clips = video.read_parts(path, lambda _: spans, 12, lambda _: np.zeros((1, 1, 3), np.uint8))
    return {rule: clip.timestamps[clip.frame_mask].tolist() for rule, clip in zip(RULES, clips, strict=True)}


def test_frames(frames_case, test_data, monkeypatch):
    compared, wrong = 0, []
    for path, clip in clips_of(frames_case, test_data).items():
        selected = timestamps_by_rule(path, monkeypatch)
        for rule, expected in clip["rules"].items():
            asked, taken, ours = expected["asked"], expected["taken"], selected[rule]
            if taken is None or (asked != taken and max(asked) >= clip["frames"]):
                continue  # for a frame after the last one, OpenCV gives another that depends on how it seeks
            times = expected["times"] if asked == taken else times_at(path, asked)
            # The segment rules repeat the last frame of a clip that has too few.
            if RULES[rule][0] == "container-segments":
                times = [*times, *times[-1:] * (len(ours) - len(times))]
            compared += 1
            if len(ours) != len(times) or np.abs(np.subtract(ours, times)).max() > 0.001:
                wrong.append(f"{path.name}, {rule}: {len(times)} frames at {times}, ours {np.round(ours, 3).tolist()}")
    report(frames_case, compared, wrong)


@pytest.mark.slow
def test_pixels(pixels_case, test_data):
    compared, wrong = 0, []

    def prepare(image):
        return np.concatenate([np.asarray(prepared(image), np.float32) for prepared in PREPARATIONS.values()])

    for path, clip in clips_of(pixels_case, test_data).items():
        spans = [(image["time"], image["time"] + 0.001) for image in clip["pictures"]]
        found = video.read_parts(path, lambda _, spans=spans: spans, 1, prepare)
        for image, part in zip(clip["pictures"], found, strict=True):
            for prepared, pixels in zip(PREPARATIONS, part.pixels[0].double().chunk(2, dim=1), strict=True):
                expected = image[prepared]
                blocks = pixels.reshape(3, 4, 56, 4, 56).mean((2, 4)).permute(1, 2, 0)
                ours = {"blocks": blocks.numpy(), "mean": pixels.mean((1, 2)).numpy()}
                ours |= {name: float(getattr(pixels, how)()) for name, how in EXTREMES.items() if name in expected}
                compared += 1
                for name, value in ours.items():
                    distance = float(np.abs(value - np.array(expected[name])).max())
                    # Half precision has steps of 1/8 from 128 and of 1/4 from 256: means are closer than extremes.
                    if distance > (0.15 if name in EXTREMES else 0.01):
                        wrong.append(f"{path.name}, {image['index']}, {prepared}: {name} differ by {distance:.3f}")
    report(pixels_case, compared, wrong)


def test_tokens(tokens_case):
    case = json.loads(tokens_case.read_text())
    tokenizer, wrong, compared = ClipTokenizer(77), [], 0
    for entry in [*case["captions"], *case["made_up"]]:
        for words in (32, 64, 77):
            (expected,) = (ids for name, ids in entry.items() if name.endswith(f"_{words}"))
            tokens = tokenizer.encode([entry["caption"]], words)
            compared += 1
            if tokens.ids[tokens.mask].tolist() != expected:
                wrong.append(f"{words} words of {entry['caption']!r}")
    report(tokens_case, compared, wrong)


@pytest.mark.slow
def test_sets(sets_case, test_data):
    case, root, facts = json.loads(sets_case.read_text()), str(test_data / "annotations"), {}
    for name, expected in case["lsmdc_test"].items():
        split = {"official": "lsmdc16", "tmass": "xpool"}.get(name, name)
        if isinstance(expected, dict):
            videos = [video.video_id for video in LSMDC(root=root, split=split).read_split("test").videos]
            digest = hashlib.sha256("\n".join(videos).encode()).hexdigest()
            facts[f"LSMDC {name} clips"] = len(videos), expected["clips"]
            facts[f"LSMDC {name} ids"] = digest, expected["sha256_of_ids_joined_by_newline"]
    didemo = DiDeMo(root=root, split="tmass")
    splits = {part: didemo.read_split(part) for part in case["didemo"]}
    for part, expected in case["didemo"].items():
        videos = [video.video_id for video in splits[part].videos]  # those of T-MASS's table
        named = {"list": read_lines(didemo.folder / f"{part}_list.txt"), "table": videos}
        found = {kind: [Path(name).stem for name in names] for kind, names in named.items()}
        facts |= {f"DiDeMo {part} {kind}": (len(ids), expected[kind]) for kind, ids in found.items()}
        only = sorted(set(found["list"]) - set(found["table"]))
        facts[f"DiDeMo {part} only in the list"] = only, sorted(expected["only_in_list"])
    for name, expected in case["didemo_released_lengths"].items():
        facts[f"DiDeMo {name}"] = len(splits[name.split("_")[1]].videos), expected
    modules = {"msrvtt-9k": MSRVTT(root=root, split="9k"), "msrvtt-7k": MSRVTT(root=root, split="7k")}
    modules |= {"msvd": MSVD(root=root), "activitynet": ActivityNet(root=root)}
    pairs = {name: len(module.read_split("train").texts) for name, module in modules.items()}
    pairs["didemo"] = len(splits["train"].texts)
    for row in case["training"]:
        name, method = f"{row['method']} on {row['dataset']}", row["method"].split()[0]
        if (RECIPES / f"{method}.yaml").exists():
            ours = recipe_of(method)["data"]["init_args"].get("drop_last", True)
            facts[f"{name}: drop_last"] = ours, row["drop_last"]
        if row["train_pairs"] is None:
            continue
        if "counted" in row["train_pairs_from"] or method in ("tmass", "gaid"):
            facts[f"{name}: pairs"] = pairs[row["dataset"]], row["train_pairs"]
        batch, replicas = row["batch_size"], row["processes"]
        sampler = TrainingSampler(row["train_pairs"], batch, drop_last=row["drop_last"], replicas=replicas)
        facts[f"{name}: steps"] = math.ceil(len(sampler) / (batch // replicas)), row["steps_per_epoch"]
    wrong = [f"{fact}: {found}, released {expected}" for fact, (found, expected) in facts.items() if found != expected]
    report(sets_case, len(facts), wrong)


def test_odd_widths(widths_case):
    files = json.loads(widths_case.read_text())["files"]
    tolerance = 0 if av.__version__.startswith("18.1.") else 2
    wrong, compared = [], 0
    for name, file in files.items():
        for filler in (0, 0x5A, 0xFF):
            # Columns that the conversion leaves unwritten show what was in the memory before.
            del [np.full(file["width"] * file["height"] * 4 + 4096, filler, np.uint8) for _ in range(16)][:]
            (_, first), *_ = frames_at_rate(widths_case.parent / name, file["rate"], np.asarray)
            compared += 1
            for band in file["bands"]:
                (top, bottom), (left, right) = band["rows"], band["columns"]
                found = first[top:bottom, left:right].astype(int)
                distance = int(np.abs(found - np.array(band["rgb_to_image"])).max())
                if distance > tolerance:
                    wrong.append(f"{name}, rows {top} to {bottom}: {distance} of 255 off")
    report(widths_case, compared, wrong)
