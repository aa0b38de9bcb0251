"""The controlled experiments: worlds differ by their factor alone, and one seed of one experiment runs to its page."""

import importlib
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Import a module of the benchmarks, which are scripts and no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def worlds(benchmark):
    return benchmark("mechanisms_worlds")


def both(world):
    return world(3, True), world(3, False)


def test_a_caption_of_one_scene_leaves_the_videos_as_they_are(worlds):
    factor, control = both(worlds.partially_relevant)
    assert torch.equal(factor.train.video.frames, control.train.video.frames)
    assert not torch.equal(factor.train.text.sentence, control.train.text.sentence)


def test_a_tenth_of_the_videos_are_hubs(worlds):
    factor, control = both(worlds.hubs)
    assert torch.equal(factor.test.text.sentence, control.test.text.sentence)
    changed = (factor.test.video.frames != control.test.video.frames).flatten(1).any(1).double().mean()
    assert 0.05 < changed < 0.15


def test_noise_spoils_one_granularity_of_every_pair(worlds):
    factor, control = both(worlds.imbalanced)
    spoilt = torch.stack(
        [
            (getattr(factor.test, side).__dict__[name] != getattr(control.test, side).__dict__[name]).flatten(1).any(1)
            for side, name in (("text", "sentence"), ("text", "words"), ("video", "frames"))
        ]
    )
    assert (spoilt.sum(0) == 1).all()
    assert (spoilt.double().mean(1) > 0.25).all()


def test_only_sound_tells_two_videos_apart(worlds):
    factor, control = both(worlds.told_by_sound)
    assert torch.equal(factor.test.video.audio, control.test.video.audio)

    def closest(world):
        frames = world.test.video.frames.mean(1)
        return torch.cdist(frames, frames).fill_diagonal_(torch.inf).argmin(1)

    twin = torch.arange(worlds.TEST) ^ 1
    assert (closest(factor) == twin).double().mean() > 0.8
    assert (closest(control) == twin).double().mean() < 0.1


def test_false_negatives_are_a_matter_of_batches(worlds):
    factor, control = both(worlds.false_negatives)
    assert torch.equal(factor.train.video.frames, control.train.video.frames)
    assert torch.equal(factor.train.text.words, control.train.text.words)
    for world, alike in ((factor, 4), (control, 1)):
        seen = []
        for rows in world.batches(torch.Generator().manual_seed(0)):
            counts = torch.bincount(rows // world.copies)
            assert set(counts[counts > 0].tolist()) == {alike}
            seen += rows.tolist()
        assert sorted(seen) == list(range(worlds.TRAIN))


def test_intervals_are_student_s(benchmark):
    estimate = benchmark("mechanisms_statistics").estimate
    values = [1.0, 2.5, 0.5, 3.0, 2.0]
    found = estimate(values)
    # 2.776 deviations of the mean: Student's t of four degrees of freedom.
    assert (found.mean, found.half) == pytest.approx((1.8, 2.776 * math.sqrt(1.075 / 5)), abs=1e-3)
    assert found.verdict == "appears"
    assert estimate([-value for value in values]).verdict == "reversed"
    assert estimate([1.0, -1.0, 0.5]).verdict == "not seen"
    assert estimate([4.0]).text(sign=True) == "+4.0"
    with pytest.raises(ValueError, match="0 seeds"):
        estimate([])


def test_one_seed_of_one_experiment_runs_to_its_page(benchmark, worlds):
    arms, training, pages = (benchmark(f"mechanisms_{name}") for name in ("arms", "training", "page"))
    experiment = next(item for item in arms.EXPERIMENTS if item.key == "conditioning")
    records = []
    for factor in (True, False):
        world = worlds.WORLDS[experiment.world](0, factor)
        for arm in experiment.arms:
            outcome = asdict(training.run(arm.build, world, 0, epochs=2))
            about = {"world": experiment.world, "factor": factor, "arm": arm.name, "seed": 0, "seconds": 1.0}
            records.append({**about, **outcome})
    mean, conditioned = (record["text_to_video"] for record in records[:2])
    assert 5 < mean < conditioned
    page = pages.page(records, pages.summary(records), "a command", "a machine")
    assert f"| {experiment.arms[1].name} | yes | {conditioned:.1f} | {conditioned - mean:+.1f} |" in page
    assert "one seed" in page
    assert "## NCL" not in page


def test_equal_seeds_give_equal_outcomes(benchmark, worlds):
    arms, training = benchmark("mechanisms_arms"), benchmark("mechanisms_training")
    runs = [training.run(arms.ncl(), worlds.hubs(1, True), 1, epochs=1) for _ in range(2)]
    assert runs[0] == runs[1]


def test_every_measured_deviation_and_leak_is_one_that_a_docstring_records(benchmark):
    from tvr_lightning.reproduce.ledger import entries

    arms = benchmark("mechanisms_arms")
    known = {(name, deviation.topic) for name, entry in entries().items() for deviation in entry.deviations}
    named = {(item.method, item.topic) for item in arms.DEVIATIONS} | {(item[0], "protocol") for item in arms.LEAKING}
    assert named <= known
