"""The controlled experiments: their synthetic data, verdicts, and committed page."""

import copy
import importlib
import json
import math
import re
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
def claims(benchmark):
    return benchmark("mechanisms_claims")


def part(setting, name):
    """Features such as `train words` or `test frames`."""
    split, kind = name.split()
    features = getattr(setting, split)
    return {"sentences": features.text.sentence, "words": features.text.words, "frames": features.video.frames}[kind]


@pytest.mark.parametrize(
    ("name", "strength", "equal", "changed", "share"),
    [
        ("undescribed scenes", 0.75, ["test sentences"], "test frames", 0.75),
        ("additional captions", 0.75, ["train words", "test frames"], "train frames", 0.75),
        ("noisy sentences", 0.9, ["train sentences", "test words", "test frames"], "test sentences", 1),
        ("noisy words", 2, ["train sentences", "train frames"], "train words", 1),
        ("lower words", 2, ["train sentences", "train frames"], "train words", 1),
    ],
)
def test_a_factor_changes_only_its_share_of_one_part(benchmark, name, strength, equal, changed, share):
    make_setting = benchmark("mechanisms_settings").make_setting
    factor, control = (make_setting(name, 3, each, 1024) for each in (strength, 0))
    for name_of_part in equal:
        assert torch.equal(part(factor, name_of_part), part(control, name_of_part)), name_of_part
    moved = (part(factor, changed) - part(control, changed)).abs().amax(-1) > 1e-5
    moved = moved if moved.ndim == 2 else moved[:, None]
    assert (moved.double().mean(1) == share).all()
    if name == "additional captions":
        assert factor.train.captions.mask.sum(1).unique().tolist() == [4]
        assert control.train.captions.mask.sum(1).unique().tolist() == [1]


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
ROLES = ("baseline", "method", "control", "diagnostic")


def summarized(benchmark, *values, refused=""):
    """The summary of one claim with arms at two points, from R@1 by arm and point."""
    runs = [[[{"text_to_video": v, "video_to_text": v} for v in seeds] for seeds in arm] for arm in values]
    arms = [{"name": role, "role": role, "runs": own} for role, own in zip(ROLES, runs, strict=False)]
    (claim,) = benchmark("mechanisms_page").summary([{"arms": arms, "refused": refused}], [])["claims"]
    first, second = claim["tests"].values()
    assert first == second
    return first


@pytest.mark.parametrize(
    ("method", "control", "verdict"),
    [
        (BETTER, BASELINE, "BETTER"),
        (BETTER, BETTER, "UNSPECIFIC"),
        (BETTER, WORSE, "BETTER"),
        (WORSE, BASELINE, "WORSE"),
        (WORSE, WORSE, "UNSPECIFIC"),
        (BASELINE, BASELINE, "NOT_SEEN"),
        ([[14, 15, 16], [9, 10, 11]], BASELINE, "ANYWAY"),
        ([[6, 7, 8], [1, 2, 3]], BASELINE, "ANYWAY"),
        ([[], []], BASELINE, "NOT_RUN"),
    ],
)
def test_better_and_worse_need_the_same_evidence(benchmark, method, control, verdict):
    if not method[0]:  # no seeds are complete
        found = summarized(benchmark, *[method] * 3)
    else:
        found = summarized(benchmark, BASELINE, method, control)
        reversed_signs = [[[-value for value in seeds] for seeds in arm] for arm in (BASELINE, method, control)]
        opposite = summarized(benchmark, *reversed_signs)
        assert opposite["p_specific"] == pytest.approx(found["p_specific"][::-1])
    assert found["verdict"] == getattr(benchmark("mechanisms_page"), verdict)


def test_a_claim_is_judged_by_its_method_and_not_by_diagnostics(benchmark):
    found = summarized(benchmark, BASELINE, BETTER, BASELINE, WORSE)
    assert found == summarized(benchmark, BASELINE, BETTER, BASELINE)
    assert found["verdict"] == benchmark("mechanisms_page").BETTER
    assert summarized(benchmark, BASELINE, BETTER, BASELINE, refused="edge")["verdict"] == "no verdict"


def test_claims_have_controls_four_strengths_and_known_deviations(benchmark, claims):
    page = benchmark("mechanisms_page")
    for claim in claims.CLAIMS:
        roles = [arm.role for arm in claim.arms]
        assert claim.points[0] == 0, claim.key
        assert len(claim.points) >= 5, claim.key
        assert roles[:3] == ["baseline", "method", "control"], claim.key
        assert len({arm.name for arm in claim.arms}) == len(roles), claim.key
        assert claim.key in page.TEXT["claims"], claim.key
    named = [(claim.key, claim.setting, claim.variant, claim.maps) for claim in claims.CLAIMS]
    assert len(set(named)) == len(named)
    assert {claim.maps for claim in claims.CLAIMS if claim.key in ("normalization", "gap")} == {0.01, 0.1, 1}
    trials = (*claims.CLAIMS, *claims.LEAKS, *claims.DEVIATIONS)
    jobs = {repr(job): job for job in benchmark("mechanisms").Plan(claims.Size()).sweep(trials)}
    assert not any(" object at " in each for each in jobs)
    assert len({benchmark("mechanisms").key(job) for job in jobs.values()}) == len(jobs)
    files = pages.method_files().items()
    known = {(name, topic) for name, path in files for topic in pages.deviations(pages.docstring(path))}
    assert {(trial.paper, trial.key) for trial in (*claims.LEAKS, *claims.DEVIATIONS)} <= known


def record(validation, test=1.0):
    return {"validation": {"plain": {"text_to_video": validation}}, "test": {"plain": {"text_to_video": test}}}


@pytest.mark.parametrize("best", [1e-4, 3e-3, 1e-1])
def test_the_grid_is_extended_until_the_best_rate_is_inside(benchmark, claims, best):
    runner, trial = benchmark("mechanisms"), claims.CLAIMS[0]
    plan, arm, chosen = runner.Plan(claims.Size()), trial.arms[1], None
    while chosen is None:
        tried, chosen = plan.choice(trial, arm, 0)
        for job in tried:
            plan.found[runner.key(job)] = record(-abs(math.log(job.rate / best)), test=job.rate)
    assert chosen.rate == best
    assert tried[0].rate < best < tried[-1].rate
    assert plan.described(trial)["refused"] == ""


@pytest.mark.slow
def test_outcomes_have_all_readings_that_the_claims_use(benchmark, claims):
    heads, settings, tried = benchmark("mechanisms_heads"), benchmark("mechanisms_settings"), set()
    size = claims.Size(pairs=settings.BATCH, queue=settings.BATCH, epochs=1)
    for trial in (*claims.CLAIMS, *claims.LEAKS, *claims.DEVIATIONS):
        for arm in trial.arms:
            job = trial.job(arm, trial.points[-1], 1, 3e-3, size)
            name = (arm.reading, type(arm.head), getattr(arm.head, "addition", ""))
            if name not in tried:
                tried.add(name)
                setting = settings.make_setting(job.setting, 1, job.strength, job.pairs)
                assert arm.reading in heads.outcome(job, setting)["test"]
    assert len(tried) >= 18


def test_the_committed_page_follows_from_its_data(benchmark, claims):
    page = benchmark("mechanisms_page")
    data = json.loads((RESULTS / "mechanisms.json").read_text(encoding="utf-8"))
    if "pairs" not in data["about"]:
        pytest.skip("the committed results are of an earlier design")
    named = [(claim.key, claim.setting, claim.variant, claim.maps) for claim in claims.CLAIMS]
    assert [tuple(claim[n] for n in ("key", "setting", "variant", "maps")) for claim in data["claims"]] == named
    again = page.summary(copy.deepcopy(data["claims"]), [])
    for before, after in zip(data["claims"], again["claims"], strict=True):
        assert [test["verdict"] for test in before["tests"].values()] == [t["verdict"] for t in after["tests"].values()]
    committed = (RESULTS / "mechanisms.md").read_text(encoding="utf-8")
    assert page.page(data) == committed, "write it again: python benchmarks/mechanisms.py --page"
    shown = set(re.findall(r"\]\((mechanisms/[^)]*)\)", committed))
    assert shown == {f"mechanisms/{path.name}" for path in (RESULTS / "mechanisms").iterdir()}
