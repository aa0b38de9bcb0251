"""The controlled experiments: worlds differ by their factor alone, verdicts follow from data, a killed run goes on."""

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


@pytest.fixture
def benchmark(monkeypatch):
    """Import a module of the benchmarks, which are scripts and no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def worlds(benchmark):
    return benchmark("mechanisms_worlds")


@pytest.fixture
def claims(benchmark):
    return benchmark("mechanisms_claims")


def changed(first, second):
    """Return which rows (N, F) of vectors (N, F, D) differ."""
    return (first - second).abs().amax(-1) > 1e-5


def cosines(vectors):
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return (unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)]


def test_vectors_are_as_long_as_clip_s_and_lie_in_a_cone_of_their_modality(worlds):
    test = worlds.untold_scenes(0, 0).test
    assert 3 < test.text.sentence.norm(dim=-1).mean() < 6
    assert 3 < test.video.frames.norm(dim=-1).mean() < 7
    assert 0.35 < cosines(test.text.sentence).mean() < 0.55
    assert 0.25 < cosines(test.video.frames[:, 0]).mean() < 0.5
    text, video = test.text.sentence.mean(0), test.video.frames.mean((0, 1))
    assert torch.cosine_similarity(text, video, dim=0).abs() < 0.1  # the gap


@pytest.mark.parametrize("strength", [0.125, 0.5, 0.75])
def test_a_share_of_the_frames_is_untold_and_nothing_else_changes(worlds, strength):
    factor, control = worlds.untold_scenes(3, strength), worlds.untold_scenes(3, 0)
    assert torch.equal(factor.test.text.sentence, control.test.text.sentence)
    moved = changed(factor.test.video.frames, control.test.video.frames)
    assert (moved.double().mean(1) == strength).all()


def test_test_videos_show_the_told_scene_alone_however_much_training_leaves_untold(worlds):
    factor, control = worlds.told_at_test(3, 0.75), worlds.told_at_test(3, 0)
    assert torch.equal(factor.test.video.frames, control.test.video.frames)
    assert torch.equal(factor.train.text.words, control.train.text.words)
    assert (changed(factor.train.video.frames, control.train.video.frames).double().mean(1) == 0.75).all()
    assert factor.train.captions.mask.sum(1).unique().tolist() == [4]
    assert control.train.captions.mask.sum(1).unique().tolist() == [1]


def test_vectors_go_along_the_other_modality_s_mean_only_where_there_is_a_cone(worlds):
    for strength in (0.0, 0.2):
        space, test = worlds.Space(3), worlds.cone(3, strength).test
        along = test.video.frames @ worlds.unit(space.text_offset)
        assert along.std(0).mean() == pytest.approx(strength * worlds.LENGTH, rel=0.15, abs=1e-4)
        along = test.text.sentence @ worlds.unit(space.video_offset)
        assert along.std() == pytest.approx(strength * worlds.LENGTH, rel=0.15, abs=1e-4)


def test_the_gap_is_as_long_as_its_strength(worlds):
    def distance(strength):
        test = worlds.gap(3, strength).test
        return (test.text.sentence.mean(0) - test.video.frames.mean((0, 1))).norm() / worlds.LENGTH

    assert distance(0) < 0.2
    assert distance(2) == pytest.approx(2 * math.sqrt(2), rel=0.2)


@pytest.mark.parametrize("name", ["false negatives", "false negatives of a style"])
def test_false_negatives_are_a_matter_of_batches(worlds, name):
    make = worlds.WORLDS[name]
    control = make(3, 0)
    for strength in (0, 1, 3, 15):
        world, seen = make(3, strength), []
        assert torch.equal(world.train.video.frames, control.train.video.frames)
        assert torch.equal(world.train.text.words, control.train.text.words)
        for rows in world.batches(torch.Generator().manual_seed(0)):
            counts = torch.bincount(rows // world.copies)
            assert set(counts[counts > 0].tolist()) == {strength + 1}
            seen += rows.tolist()
        assert sorted(seen) == list(range(2 * worlds.TRAIN))


def test_text_and_video_share_their_style_in_training_alone(worlds):
    def agreement(make):
        train = make(3, 0).train
        text, video = train.text.sentence, train.video.frames.mean(1)
        text, video = (each.unflatten(0, (-1, 16)) for each in (text, video))
        text, video = text - text.mean(1, keepdim=True), video - video.mean(1, keepdim=True)
        return float((text * video).sum(-1).mean())

    assert agreement(worlds.false_negatives_of_a_style) > 1.0
    assert abs(agreement(worlds.false_negatives)) < 0.1
    # A map that amplifies what sentences of one content differ by finds styles, and misleads at test.
    test = worlds.false_negatives_of_a_style(3, 0).test
    plain = worlds.false_negatives(3, 0).test

    def found(split):
        scores = torch.nn.functional.normalize(split.text.sentence, dim=1) @ split.video.frames.mean(1).T
        return (scores.argmax(1) == torch.arange(len(scores))).double().mean()

    assert found(test) < found(plain) - 0.1


def test_only_sentences_at_test_are_noisier(worlds):
    factor, control = worlds.noisy_sentences(3, 0.9), worlds.noisy_sentences(3, 0)
    assert torch.equal(factor.train.text.sentence, control.train.text.sentence)
    assert torch.equal(factor.test.video.frames, control.test.video.frames)
    assert torch.equal(factor.test.text.words, control.test.text.words)
    assert not torch.equal(factor.test.text.sentence, control.test.text.sentence)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_only_sound_tells_twins_apart(worlds, share):
    world = worlds.told_by_sound(3, share)
    assert torch.equal(world.test.video.audio, worlds.told_by_sound(3, 0).test.video.audio)
    frames = world.test.video.frames.mean(1)
    closest = torch.cdist(frames, frames).fill_diagonal_(torch.inf).argmin(1)
    twins = (closest == torch.arange(worlds.TEST) ^ 1).double().mean()
    assert 0.8 * share <= twins <= share + 0.05


def test_only_words_are_noisier(worlds):
    factor, control = worlds.noisy_words(3, 2), worlds.noisy_words(3, 0)
    assert torch.equal(factor.train.text.sentence, control.train.text.sentence)
    assert torch.equal(factor.train.video.frames, control.train.video.frames)
    assert changed(factor.train.text.words, control.train.text.words).all()


def test_intervals_are_student_s_and_verdicts_ask_for_the_factor(benchmark):
    page = benchmark("mechanisms_page")
    found = page.estimate([1.0, 2.5, 0.5, 3.0, 2.0])
    # 2.776 deviations of the mean: Student's t of four degrees of freedom.
    assert found == pytest.approx({"mean": 1.8, "half_width": 2.776 * math.sqrt(1.075 / 5)}, abs=1e-3)
    with pytest.raises(ValueError, match="1 seeds"):
        page.estimate([4.0])
    above, around, below = ({"mean": mean, "half_width": 1.0} for mean in (2.0, 0.5, -2.0))
    assert page.verdict(above, above) == "seen"
    assert page.verdict(above, around) == "not by the factor"
    assert page.verdict(around, above) == "not seen"
    assert page.verdict(below, above) == "reversed"


def test_a_claim_is_tried_at_four_points_or_more_and_the_first_is_its_control(claims):
    for claim in claims.CLAIMS:
        assert claim.points[0] == 0, claim.key
        assert len(claim.points) >= 4, claim.key
        assert claim.verdict_at in claim.points[1:], claim.key
        assert len({arm.name for arm in claim.arms}) == len(claim.arms) >= 2, claim.key


def test_equal_heads_have_equal_keys_and_others_have_not(benchmark, claims):
    command = benchmark("mechanisms")
    plan = command.Plan(claims.CLAIMS, (*claims.LEAKS, *claims.DEVIATIONS), 2)
    jobs = plan.jobs()
    assert list(jobs) == list(plan.jobs())
    assert len({repr(job) for job in jobs.values()}) == len(jobs)
    assert not any(" object at " in repr(job) for job in jobs.values())
    (one, *_) = jobs.values()
    assert command.key(one, 3) != command.key(one)


def test_text_conditioned_pooling_is_seen_and_equal_seeds_give_equal_outcomes(benchmark, worlds, claims):
    heads, page = benchmark("mechanisms_heads"), benchmark("mechanisms_page")
    (claim,) = (claim for claim in claims.CLAIMS if claim.key == "conditioning")

    def trained(arm):
        return heads.outcome(arm.head, worlds.untold_scenes(1, 0.5), 1, 1e-3, steps=16)

    mean, conditioned = (trained(arm)["plain"][page.TEXT_TO_VIDEO] for arm in claim.arms)
    assert 5 < mean < conditioned
    assert trained(claim.arms[1])["plain"][page.TEXT_TO_VIDEO] == conditioned


def test_a_head_is_read_in_all_the_ways_that_its_claims_name(benchmark, worlds, claims):
    heads = benchmark("mechanisms_heads")
    names = {}
    for item in (*claims.LEAKS, *claims.DEVIATIONS):
        for arm in (item.ours, item.other):
            names.setdefault(repr(arm.head), (arm.head, set()))[1].add(arm.reading)
    for claim in claims.CLAIMS:
        for arm in claim.arms:
            names.setdefault(repr(arm.at(claim.verdict_at)), (arm.at(claim.verdict_at), set()))[1].add(arm.reading)
    special = [(head, wanted) for head, wanted in names.values() if wanted - {"plain"}]
    assert len(special) >= 4
    for head, wanted in special:
        sound = isinstance(head, heads.GAIDOptions)
        world = worlds.told_by_sound(0, 1) if sound else worlds.gap(0, 1)
        assert wanted <= set(heads.outcome(head, world, 0, 1e-3, steps=1))


def test_bare_texts_of_gare_go_without_increments(benchmark, worlds, claims):
    heads = benchmark("mechanisms_heads")
    adapted = heads.build(claims.gare(), 0)
    world = worlds.gap(0, 1)
    found = heads.readings(adapted.eval(), world)
    without = heads.readings(heads.build(claims.GARE_ARMS[0].head, 0).eval(), world)
    assert found["bare"] == without["plain"] != found["plain"]
    assert heads.readings(adapted, world) == found  # increments are there again


def test_every_measured_deviation_and_leak_is_one_that_a_docstring_records(claims):
    known = {
        (name, topic)
        for name, path in pages.method_files().items()
        for topic in pages.deviations(pages.docstring(path))
    }
    assert {(item.method, item.topic) for item in (*claims.LEAKS, *claims.DEVIATIONS)} <= known


def test_the_committed_page_is_what_its_data_say(benchmark, claims):
    page = benchmark("mechanisms_page")
    data = json.loads((RESULTS / "mechanisms.json").read_text(encoding="utf-8"))
    kept = {claim["key"] for claim in data["claims"]} | set(data["about"]["missing"])
    assert {claim.key for claim in claims.CLAIMS} <= kept
    for claim in data["claims"]:
        assert claim["results"] == page.results(claim)
        assert all(len(runs) == data["about"]["seeds"] == 5 for arm in claim["arms"] for runs in arm["text_to_video"])
    for item in (*data["leaks"], *data["deviations"]):
        assert page.estimate(item["by_seed"]) == {name: item[name] for name in ("mean", "half_width")}
    committed = (RESULTS / "mechanisms.md").read_text(encoding="utf-8")
    assert page.page(data) == committed, "write it anew: python benchmarks/mechanisms.py --page"
    shown = set(re.findall(r"\]\((mechanisms/[^)]*)\)", committed))
    assert shown == {f"mechanisms/{path.name}" for path in (RESULTS / "mechanisms").iterdir()}
    assert re.search(r"fixed before training, in\ncommit [0-9a-f]{7,} of [0-9T:+-]*", committed)
    assert "changed since" not in committed


def command(folder: Path, *arguments: str) -> list[str]:
    script = [sys.executable, str(BENCHMARKS / "mechanisms.py")]
    return [*script, "--records", str(folder / "records.jsonl"), "--out", str(folder), *arguments]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--worlds", "cones"), "there is no world 'cones'; did you mean 'cone'? There are: 'untold scenes'"),
        (("--arms", "GARF"), "there is no arm 'GARF'; did you mean 'GARE'? There are: "),
        (("--claims", "colour"), "there is no claim 'colour'. There are: 'conditioning'"),
        (("--seeds", "1"), "--seeds is 1; an interval takes at least 2"),
        (("--num_workers", "0"), "--num_workers is 0; training takes at least 1"),
        (("--worlds", "cone", "--claims", "gap"), "nothing is left of claims, worlds and arms"),
    ],
)
def test_what_does_not_exist_is_refused_in_a_sentence(benchmark, monkeypatch, capsys, tmp_path, arguments, sentence):
    module = benchmark("mechanisms")
    monkeypatch.setattr(sys, "argv", command(tmp_path, *arguments)[1:])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_run_keeps_its_heads_and_does_not_train_them_again(tmp_path, ended):
    records = tmp_path / "records.jsonl"
    arguments = command(tmp_path, "--quick", "--claims", "normalisation", "--num_workers", "2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = ended(
        subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path, start_new_session=True)
    )
    while not records.exists() or records.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(children) >= 2
    assert not any(Path(f"/proc/{child}").exists() for child in children), "workers outlive a killed run"
    kept = records.read_text()[: records.read_text().rfind("\n") + 1]
    records.write_text(kept + '{"key": "half a li')
    count = kept.count("\n")
    assert 2 <= count < 8
    again = subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert f"8 heads, of which {count} are there" in again.stdout
    assert "left out the last line" in again.stdout
    text = records.read_text()
    assert text.startswith(kept)
    keys = [json.loads(line)["key"] for line in text.splitlines()]
    assert len(keys) == len(set(keys)) == 8
    page = (tmp_path / "mechanisms.md").read_text()
    assert "8 heads from 2 seeds each" in page
    assert "## NCL: normalisation" in page
    assert (tmp_path / "mechanisms" / "normalisation.svg").read_text().startswith("<?xml")
    third = subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert third.stdout == "8 heads, of which 8 are there\n"
