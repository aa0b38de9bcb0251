"""The controlled experiments: their synthetic data, verdicts, committed page, and resumption."""

import copy
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pages
import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture(scope="module")
def benchmark():
    """Import a module of the benchmarks, which are scripts and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


@pytest.fixture(scope="module")
def worlds(benchmark):
    return benchmark("mechanisms_worlds")


@pytest.fixture(scope="module")
def claims(benchmark):
    return benchmark("mechanisms_claims")


def part(world, name):
    """Features such as `train words` or `test frames`."""
    split, kind = name.split()
    features = getattr(world, split)
    return {"sentences": features.text.sentence, "words": features.text.words, "frames": features.video.frames}[kind]


@pytest.mark.parametrize(
    ("name", "strength", "equal", "changed", "share"),
    [
        ("undescribed scenes", 0.125, ["test sentences"], "test frames", 0.125),
        ("undescribed scenes", 0.5, ["test sentences"], "test frames", 0.5),
        ("undescribed scenes", 0.75, ["test sentences"], "test frames", 0.75),
        ("additional captions", 0.75, ["train words", "test frames"], "train frames", 0.75),
        ("noisy sentences", 0.9, ["train sentences", "test words", "test frames"], "test sentences", 1),
        ("noisy words", 2, ["train sentences", "train frames"], "train words", 1),
    ],
)
def test_a_factor_changes_only_its_share_of_one_part(worlds, name, strength, equal, changed, share):
    factor, control = worlds.make_world(name, 3, strength), worlds.make_world(name, 3, 0)
    for name_of_part in equal:
        assert torch.equal(part(factor, name_of_part), part(control, name_of_part)), name_of_part
    moved = (part(factor, changed) - part(control, changed)).abs().amax(-1) > 1e-5
    moved = moved if moved.ndim == 2 else moved[:, None]
    assert (moved.double().mean(1) == share).all()
    if name == "additional captions":
        assert factor.train.captions.mask.sum(1).unique().tolist() == [4]
        assert control.train.captions.mask.sum(1).unique().tolist() == [1]


def test_the_length_of_cones_and_gaps_equals_their_strength(worlds):
    for strength in (0.0, 0.2):
        space, test = worlds.Space(3), worlds.make_world("cone", 3, strength).test
        along = test.video.frames @ worlds.unit(space.text_offset)
        assert along.std(0).mean() == pytest.approx(strength * worlds.LENGTH, rel=0.15, abs=1e-4)
        along = test.text.sentence @ worlds.unit(space.video_offset)
        assert along.std() == pytest.approx(strength * worlds.LENGTH, rel=0.15, abs=1e-4)
    gaps = [worlds.make_world("gap", 3, strength).test for strength in (0, 2)]
    none, gap = ((t.text.sentence.mean(0) - t.video.frames.mean((0, 1))).norm() / worlds.LENGTH for t in gaps)
    assert none < 0.2
    assert gap == pytest.approx(2 * math.sqrt(2), rel=0.2)


@pytest.mark.parametrize("name", ["false negatives", "false negatives of a style"])
def test_false_negatives_only_change_the_batches(worlds, name):
    control = worlds.make_world(name, 3, 0)
    for strength in (0, 1, 3, 15):
        world, seen = worlds.make_world(name, 3, strength), []
        assert torch.equal(world.train.video.frames, control.train.video.frames)
        assert torch.equal(world.train.text.words, control.train.text.words)
        for rows in world.batches(torch.Generator().manual_seed(0)):
            counts = torch.bincount(rows // world.copies)
            assert set(counts[counts > 0].tolist()) == {strength + 1}
            seen += rows.tolist()
        assert sorted(seen) == list(range(2 * worlds.TRAIN))


def test_text_and_video_share_their_style_only_in_training(worlds):
    def agreement(name):
        train = worlds.make_world(name, 3, 0).train
        text, video = train.text.sentence, train.video.frames.mean(1)
        text, video = (each.unflatten(0, (-1, 16)) for each in (text, video))
        text, video = text - text.mean(1, keepdim=True), video - video.mean(1, keepdim=True)
        return float((text * video).sum(-1).mean())

    assert agreement("false negatives of a style") > 1.0
    assert abs(agreement("false negatives")) < 0.1
    # A map that amplifies what sentences of one content differ by finds styles, and misleads at test.
    test = worlds.make_world("false negatives of a style", 3, 0).test
    plain = worlds.make_world("false negatives", 3, 0).test

    def found(split):
        scores = torch.nn.functional.normalize(split.text.sentence, dim=1) @ split.video.frames.mean(1).T
        return (scores.argmax(1) == torch.arange(len(scores))).double().mean()

    assert found(test) < found(plain) - 0.1


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_only_audio_distinguishes_twins(worlds, share):
    world = worlds.make_world("described audio", 3, share)
    assert torch.equal(world.test.video.audio, worlds.make_world("described audio", 3, 0).test.video.audio)
    frames = world.test.video.frames.mean(1)
    closest = torch.cdist(frames, frames).fill_diagonal_(torch.inf).argmin(1)
    twins = (closest == torch.arange(worlds.TEST) ^ 1).double().mean()
    assert 0.8 * share <= twins <= share + 0.05


def test_intervals_p_values_and_verdicts(benchmark):
    page = benchmark("mechanisms_page")
    found = page.estimate([1.0, 2.5, 0.5, 3.0, 2.0])
    # 2.776 deviations of the mean: Student's t of four degrees of freedom.
    assert found == pytest.approx({"mean": 1.8, "half_width": 2.776 * math.sqrt(1.075 / 5)}, abs=1e-3)
    constant = [[page.p_value([value] * 2, side) for side in ("greater", "less")] for value in (1.0, 0.0, -1.0)]
    assert constant == [[0, 1], [1, 1], [1, 0]]
    rising = [1.0, 2.5, 0.5, 3.0, 2.0]
    assert page.p_value(rising, "greater") == pytest.approx(0.0089, abs=1e-3)
    assert page.p_value(rising, "less") == pytest.approx(1 - page.p_value(rising, "greater"))


BASELINE, BETTER, WORSE = [[10, 11, 12], [5, 6, 7]], [[10, 11, 12], [9, 10.5, 11]], [[10, 11, 12], [1, 2, 2.5]]


def summarized(benchmark, *values):
    """The summary of one claim with arms at two points, from R@1 by arm and point."""
    runs = [[[{"text_to_video": v, "video_to_text": v} for v in seeds] for seeds in arm] for arm in values]
    arms = [{"name": str(place), "runs": own} for place, own in enumerate(runs)]
    return benchmark("mechanisms_page").summary([{"arms": arms}], [], 0)["claims"][0]


@pytest.mark.parametrize(
    ("method", "verdict"),
    [
        (BETTER, "BETTER"),
        (WORSE, "WORSE"),
        (BASELINE, "NOT_SEEN"),
        ([[14, 15, 16], [9, 10, 11]], "ANYWAY"),
        ([[6, 7, 8], [1, 2, 3]], "ANYWAY"),
    ],
)
def test_better_and_worse_need_the_same_evidence(benchmark, method, verdict):
    found = summarized(benchmark, BASELINE, method)
    assert found["verdict"] == getattr(benchmark("mechanisms_page"), verdict)
    assert summarized(benchmark, method, BASELINE)["p_corrected"] == pytest.approx(found["p_corrected"])


def test_a_claim_is_judged_by_its_method_and_not_by_diagnostic_arms(benchmark):
    assert summarized(benchmark, BASELINE, BETTER, WORSE)["verdict"] == benchmark("mechanisms_page").BETTER


def test_claims_have_controls_and_unique_keys_and_known_deviations(benchmark, claims):
    for claim in claims.CLAIMS:
        assert claim.points[0] == 0, claim.key
        assert len(claim.points) >= 3, claim.key
        assert len({arm.name for arm in claim.arms}) == len(claim.arms) >= 2, claim.key
    assert len({claim.key for claim in claims.CLAIMS}) == len(claims.CLAIMS)
    trials = (*claims.CLAIMS, *claims.LEAKS, *claims.DEVIATIONS)
    jobs = {repr(job): job for trial in trials for job in trial.sweep(claims.SETTINGS)}
    assert not any(" object at " in each for each in jobs)
    assert len({benchmark("mechanisms").key(job) for job in jobs.values()}) == len(jobs)
    files = pages.method_files().items()
    known = {(name, topic) for name, path in files for topic in pages.deviations(pages.docstring(path))}
    assert {(trial.paper, trial.key) for trial in (*claims.LEAKS, *claims.DEVIATIONS)} <= known


def test_settings_are_chosen_on_validation_pairs(benchmark, claims):
    command, trial = benchmark("mechanisms"), claims.CLAIMS[0]
    arm, settings = trial.arms[0], ((1e-3, 1), (3e-3, 1))

    def record(validation, test):
        return {"validation": {"plain": {"text_to_video": validation}}, "test": {"plain": {"text_to_video": test}}}

    for point in trial.points:
        end = point if point in trial.ends else trial.points[-1]
        first, second = (trial.job(arm, end, 0, setting) for setting in settings)
        found = {command.key(first): record(9, 1), command.key(second): record(8, 90)}
        assert command.chosen(trial, arm, point, settings, found) == first


def test_text_conditioned_pooling_helps_and_equal_seeds_give_equal_outcomes(benchmark, worlds, claims):
    heads = benchmark("mechanisms_heads")
    (claim,) = (claim for claim in claims.CLAIMS if claim.key == "conditioning")

    def trained(arm):
        world = worlds.make_world("undescribed scenes", 1, 0.5)
        return heads.outcome(arm.head, world, 1, 1e-3, 1.0, steps=16)

    mean, conditioned = (trained(arm) for arm in claim.arms)
    assert 5 < mean["test"]["plain"][heads.TEXT_TO_VIDEO] < conditioned["test"]["plain"][heads.TEXT_TO_VIDEO]
    assert trained(claim.arms[1]) == conditioned
    assert conditioned["test"] != conditioned["validation"]


def test_outcomes_have_all_readings_that_the_claims_use(benchmark, worlds, claims):
    heads = benchmark("mechanisms_heads")
    names = {}
    for trial in (*claims.CLAIMS, *claims.LEAKS, *claims.DEVIATIONS):
        for arm in trial.arms:
            names.setdefault(repr(arm.head), (arm.head, set()))[1].add(arm.reading)
    special = [(head, wanted) for head, wanted in names.values() if wanted - {"plain"}]
    assert len(special) >= 4
    for head, wanted in special:
        sound = isinstance(head, heads.GAIDOptions)
        world = worlds.make_world("described audio" if sound else "gap", 0, 1)
        assert wanted <= set(heads.outcome(head, world, 0, 1e-3, 1.0, steps=1)["test"])


def test_the_bare_reading_of_gare_has_no_increments(benchmark, worlds, claims):
    heads = benchmark("mechanisms_heads")
    adapted = heads.build(claims.gare(), 0)
    world = worlds.make_world("gap", 0, 1)
    found = heads.readings(adapted.eval(), world.test)
    without = heads.readings(heads.build(claims.GARE_ARMS[0].head, 0).eval(), world.test)
    assert found["bare"] == without["plain"] != found["plain"]
    assert heads.readings(adapted, world.test) == found  # increments are there again


def test_the_committed_page_follows_from_its_data(benchmark, claims):
    page = benchmark("mechanisms_page")
    data = json.loads((RESULTS / "mechanisms.json").read_text(encoding="utf-8"))
    assert [claim["key"] for claim in data["claims"]] == [claim.key for claim in claims.CLAIMS]
    trials = (*claims.LEAKS, *claims.DEVIATIONS)
    effects = (*data["leaks"], *data["deviations"])
    assert [(item["method"], item["topic"]) for item in effects] == [(trial.paper, trial.key) for trial in trials]
    for claim in data["claims"]:
        assert all(len(runs) == data["about"]["seeds"] == 5 for arm in claim["arms"] for runs in arm["runs"])
    verdicts = [claim["verdict"] for claim in data["claims"]]
    again = page.summary(copy.deepcopy(data["claims"]), [], 0)
    assert [claim["verdict"] for claim in again["claims"]] == verdicts
    committed = (RESULTS / "mechanisms.md").read_text(encoding="utf-8")
    assert page.page(data) == committed, "write it again: python benchmarks/mechanisms.py --page"
    shown = set(re.findall(r"\]\((mechanisms/[^)]*)\)", committed))
    assert shown == {f"mechanisms/{path.name}" for path in (RESULTS / "mechanisms").iterdir()}
    assert "changed since" not in committed


def command(folder: Path, *arguments: str) -> list[str]:
    script = [sys.executable, str(BENCHMARKS / "mechanisms.py")]
    return [*script, "--records", str(folder / "records.jsonl"), "--out", str(folder), *arguments]


@pytest.mark.slow
def test_a_killed_run_resumes_without_training_finished_heads_again(tmp_path, ended):
    records = tmp_path / "records.jsonl"
    arguments = command(tmp_path, "--quick", "--seeds", "2", "--claims", "normalization", "--num_workers", "2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = ended(
        subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path, start_new_session=True)
    )
    while not records.exists() or records.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "workers outlive a killed run"
        time.sleep(0.1)
    kept = records.read_text()[: records.read_text().rfind("\n") + 1]
    records.write_text(kept + '{"key": "half a li')
    count = kept.count("\n")
    assert 2 <= count < 4
    again = subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert f"choosing: 4 heads, {count} of them finished" in again.stdout
    assert "removed the incomplete last line" in again.stdout
    text = records.read_text()
    assert text.startswith(kept)
    keys = [json.loads(line)["key"] for line in text.splitlines()]
    assert len(keys) == len(set(keys)) == 8
    page = (tmp_path / "mechanisms.md").read_text()
    assert "8 heads, " in page
    assert "## NCL: normalization" in page
    assert (tmp_path / "mechanisms" / "ncl-normalization-recall.svg").read_text().startswith("<?xml")
    third = subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert third.stdout == "choosing: 4 heads, 4 of them finished\nseeds: 8 heads, 8 of them finished\n"
