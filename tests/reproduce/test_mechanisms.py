"""The controlled experiments: their synthetic data, verdicts, and committed page."""

import copy
import dataclasses
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
def settings(benchmark):
    return benchmark("mechanisms_settings")


@pytest.fixture(scope="module")
def claims(benchmark):
    return benchmark("mechanisms_claims")


def made(settings, name, strength, pairs=1024):
    return settings.make_setting(name, 3, strength, pairs)


def part(setting, name):
    """Features such as `train words` or `test frames`."""
    split, kind = name.split()
    features = getattr(setting, split)
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
        ("lower words", 2, ["train sentences", "train frames"], "train words", 1),
    ],
)
def test_a_factor_changes_only_its_share_of_one_part(settings, name, strength, equal, changed, share):
    factor, control = made(settings, name, strength), made(settings, name, 0)
    for name_of_part in equal:
        assert torch.equal(part(factor, name_of_part), part(control, name_of_part)), name_of_part
    moved = (part(factor, changed) - part(control, changed)).abs().amax(-1) > 1e-5
    moved = moved if moved.ndim == 2 else moved[:, None]
    assert (moved.double().mean(1) == share).all()
    if name == "additional captions":
        assert factor.train.captions.mask.sum(1).unique().tolist() == [4]
        assert control.train.captions.mask.sum(1).unique().tolist() == [1]


def test_the_length_of_cones_and_gaps_equals_their_strength(settings):
    for strength in (0.0, 0.2):
        space, test = settings.Space(3), made(settings, "cone", strength).test
        along = test.video.frames @ settings.unit(space.text_offset)
        assert along.std(0).mean() == pytest.approx(strength * settings.LENGTH, rel=0.15, abs=1e-4)
        along = test.text.sentence @ settings.unit(space.video_offset)
        assert along.std() == pytest.approx(strength * settings.LENGTH, rel=0.15, abs=1e-4)
    gaps = [made(settings, "gap", strength).test for strength in (0, 2)]
    none, gap = ((t.text.sentence.mean(0) - t.video.frames.mean((0, 1))).norm() / settings.LENGTH for t in gaps)
    assert none < 0.2
    assert gap == pytest.approx(2 * math.sqrt(2), rel=0.2)


@pytest.mark.parametrize("name", ["false negatives", "false negatives of a style"])
def test_false_negatives_only_change_the_batches(settings, name):
    control = made(settings, name, 0)
    for strength in (0, 1, 3, 15):
        setting, seen = made(settings, name, strength), []
        assert torch.equal(setting.train.video.frames, control.train.video.frames)
        assert torch.equal(setting.train.text.words, control.train.text.words)
        for rows in setting.batches(torch.Generator().manual_seed(0)):
            counts = torch.bincount(rows // setting.copies)
            assert set(counts[counts > 0].tolist()) == {strength + 1}
            seen += rows.tolist()
        assert sorted(seen) == list(range(1024))


def test_text_and_video_share_their_style_only_in_training(settings):
    def agreement(name):
        train = made(settings, name, 0).train
        text, video = train.text.sentence, train.video.frames.mean(1)
        text, video = (each.unflatten(0, (-1, 16)) for each in (text, video))
        text, video = text - text.mean(1, keepdim=True), video - video.mean(1, keepdim=True)
        return float((text * video).sum(-1).mean())

    assert agreement("false negatives of a style") > 1.0
    assert abs(agreement("false negatives")) < 0.1
    # A map that amplifies what sentences of one content differ by finds styles, and misleads at test.
    test = made(settings, "false negatives of a style", 0).test
    plain = made(settings, "false negatives", 0).test

    def found(split):
        scores = torch.nn.functional.normalize(split.text.sentence, dim=1) @ split.video.frames.mean(1).T
        return (scores.argmax(1) == torch.arange(len(scores))).double().mean()

    assert found(test) < found(plain) - 0.1


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_only_audio_distinguishes_twins(settings, share):
    test = made(settings, "described audio", share).test
    assert torch.equal(test.video.audio, made(settings, "described audio", 0).test.video.audio)
    frames = test.video.frames.mean(1)
    closest = torch.cdist(frames, frames).fill_diagonal_(torch.inf).argmin(1)
    twins = (closest == torch.arange(settings.TEST) ^ 1).double().mean()
    assert 0.8 * share <= twins <= share + 0.05


def test_lower_words_keep_the_order_of_the_videos(settings):
    plain, lower = (made(settings, "lower words", strength).test for strength in (0, 4))
    videos = settings.unit(plain.video.frames.mean(1)).mT
    before, after = (settings.unit(each.text.words[:, 0]) @ videos for each in (plain, lower))
    shorter = (plain.text.words[:, 0].norm(dim=1) / lower.text.words[:, 0].norm(dim=1)).unsqueeze(1)
    assert torch.allclose(after, shorter * before, atol=1e-5)
    assert shorter.mean() < 0.6


@pytest.mark.parametrize("share", [0, 0.25, 0.875])
def test_unrelated_audio_is_a_hum_in_its_share_of_the_frames(settings, share):
    audio = made(settings, "unrelated audio", share).test.video.audio
    along = audio @ settings.Space(3).hum / settings.LENGTH
    assert ((along > 1).double().mean(1) - share).abs().mean() < 0.02


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


def test_a_best_rate_at_the_edge_of_the_grid_is_refused(benchmark, claims):
    runner, trial = benchmark("mechanisms"), claims.CLAIMS[0]
    plan, arm = runner.Plan(claims.Size()), trial.arms[1]
    for rate in claims.RATES:
        plan.found[runner.key(trial.job(arm, 0, 0, rate, plan.size))] = record(rate)
    refused = plan.described(trial)["refused"]
    assert refused == 'the best rate of "X-Pool" at 0, 1, is at the edge of the grid'


def test_of_equal_rates_the_middle_one_is_chosen(benchmark, claims):
    runner, trial = benchmark("mechanisms"), claims.CLAIMS[0]
    plan, arm, chosen = runner.Plan(claims.Size()), trial.arms[1], None
    while chosen is None:
        tried, chosen = plan.choice(trial, arm, 0)
        plan.found |= {runner.key(job): record(50.0) for job in tried}
    assert chosen.rate == claims.FULL_RATE
    assert tried[0].rate < chosen.rate < tried[-1].rate


def test_slow_maps_have_a_fixed_rate(claims):
    (slow, slower, fast) = (claims._ncl(maps) for maps in (0.1, 0.01, 1))
    baseline, layer = slow.arms[0], slow.arms[3]
    rates = [trial.job(layer, 0, 0, 1e-2, claims.Size()).maps for trial in (slow, slower, fast)]
    assert rates == pytest.approx([3e-4, 3e-5, 1e-2])
    assert len(slow.rates(baseline)) == 1  # nothing but slow maps to train
    assert len(slow.rates(layer)) == len(fast.rates(baseline)) == 3


def small_job(claims, trial, arm, point, **changes):
    size = claims.Size(pairs=1024, queue=1024, epochs=1)
    return dataclasses.replace(trial.job(arm, point, 1, 3e-3, size), **changes)


def test_text_conditioned_pooling_helps_and_equal_seeds_give_equal_outcomes(benchmark, settings, claims):
    heads, claim = benchmark("mechanisms_heads"), claims.CLAIMS[0]

    def trained(arm):
        return heads.outcome(small_job(claims, claim, arm, 0.5), settings.make_setting(claim.setting, 1, 0.5, 1024))

    mean, conditioned, constant = (trained(arm)["test"]["plain"][heads.TEXT_TO_VIDEO] for arm in claim.arms)
    assert 5 < constant < conditioned
    assert mean < conditioned
    assert trained(claim.arms[1]) == trained(claim.arms[1])


def test_outcomes_have_all_readings_that_the_claims_use(benchmark, settings, claims):
    heads, tried = benchmark("mechanisms_heads"), set()
    for trial in (*claims.CLAIMS, *claims.LEAKS, *claims.DEVIATIONS):
        for arm in trial.arms:
            job = small_job(claims, trial, arm, trial.points[-1], pairs=settings.BATCH, queue=settings.BATCH)
            name = (arm.reading, type(arm.head), getattr(arm.head, "addition", ""))
            if name not in tried:
                tried.add(name)
                setting = settings.make_setting(job.setting, 1, job.strength, job.pairs)
                assert arm.reading in heads.outcome(job, setting)["test"]
    assert len(tried) >= 18


def test_controls_do_not_use_the_idea_of_their_method(benchmark, settings, claims):
    heads = benchmark("mechanisms_heads")
    setting = settings.make_setting("described audio", 1, 1, 64)
    for addition, head in (("constant query", claims.PLAIN_XPOOL), ("constant query", claims.tcmgc(0.0))):
        control = heads.build(heads.Control(head, addition), 0, 64).eval()
        text, video = control.texts(setting.test.text), control.videos(setting.test.video)
        prepared, _ = control.method.head.prepare(text, video)
        assert torch.equal(prepared.queries[0], prepared.queries[1])
    gate = heads.build(heads.Control(claims.gaid(), "constant gate"), 0, 64).method.head.gate
    assert all((parameter == 0).all() and not parameter.requires_grad for parameter in gate.parameters())
    weights = heads.ConstantWeights(4)(torch.randn(4, 2, 3))
    assert torch.equal(weights, torch.full((4, 2, 3), 0.25))


def test_the_bare_reading_of_gare_has_no_increments(benchmark, settings, claims):
    heads = benchmark("mechanisms_heads")
    adapted = heads.build(claims.gare(), 0, 64)
    test = settings.make_setting("gap", 0, 1, 64).test
    found = heads.readings(adapted.eval(), test, ["plain", "bare"])
    without = heads.readings(heads.build(claims.gare(increment=claims.NoIncrement()), 0, 64).eval(), test, ["plain"])
    assert found["bare"] == without["plain"] != found["plain"]
    assert heads.readings(adapted, test, ["plain", "bare"]) == found  # increments are there again


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
