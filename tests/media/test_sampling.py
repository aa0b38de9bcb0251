"""Positions of sampled frames: the authors' rules at constant rates, equal times at variable ones."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tvr_lightning.media.sampling import Declared, sample_frames

ALL = (
    "one-fps-uniform", "segment-centers", "segment-random", "head", "tail", "uniform-floor", "uniform-round",
    "one-fps-even",
)  # fmt: skip


def constant(count: int, rate: float) -> tuple[np.ndarray, float]:
    return np.arange(count) / rate, count / rate


def xpool_positions(count: int, frames: int) -> list[int]:
    """Middles of equal segments by X-Pool's arithmetic, the last one repeated."""
    edges = np.linspace(start=0, stop=count, num=min(frames, count) + 1).astype(int).tolist()
    middles = [(first + after - 1) // 2 for first, after in pairwise(edges)]
    return middles + middles[-1:] * (frames - len(middles))


@given(st.integers(1, 900), st.integers(1, 60), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_one_frame_per_second_equals_clip4clip(count, rate, frames):
    expected = [second * rate for second in range(count) if second * rate < count]
    if len(expected) > frames:
        expected = [expected[i] for i in np.linspace(0, len(expected) - 1, frames, dtype=int)]
    assert sample_frames(*constant(count, rate), frames, "one-fps-uniform").tolist() == expected


@given(st.integers(1, 900), st.floats(1, 60), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_segment_centers_equal_xpool(count, rate, frames):
    positions = sample_frames(*constant(count, rate), frames, "segment-centers")
    assert positions.tolist() == xpool_positions(count, frames)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_random_positions_are_in_their_segments(count, frames, seed):
    generator = np.random.default_rng(seed)
    positions = sample_frames(*constant(count, 25.0), frames, "segment-random", generator=generator).tolist()
    taken = min(frames, count)
    edges = np.linspace(0, count, taken + 1).astype(int)
    assert all(edges[k] <= positions[k] < edges[k + 1] for k in range(taken))
    assert positions[taken:] == [positions[taken - 1]] * (frames - taken)
    drawn = [sample_frames(*constant(12, 4.0), 3, "segment-random", generator=generator).tolist() for _ in range(99)]
    assert {position for each in drawn for position in each} == set(range(12))


@given(
    st.sampled_from(ALL), st.lists(st.floats(0.001, 3), min_size=1, max_size=60), st.integers(1, 20),
    st.floats(0, 0.9), st.floats(0.05, 1),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_positions_are_sorted_and_in_the_span(sampling, gaps, frames, begin, length):
    times = np.concatenate([[0.0], np.cumsum(gaps)])[:-1]
    duration = float(np.sum(gaps))
    span = (begin * duration, (begin + length) * duration)
    positions = sample_frames(times, duration, frames, sampling, span, np.random.default_rng(0))
    assert (np.diff(positions) >= 0).all()
    assert 1 <= len(positions) <= frames
    assert not sampling.startswith("segment") or len(positions) == frames
    ends = np.append(times[1:], duration)
    assert (times[positions] < span[1] + 1e-5).all()
    assert (ends[positions] > span[0] - 1e-5).all(), "the frame is still on screen when the span begins"


def test_frames_of_variable_rate_are_those_on_screen():
    clip = np.array([0.0, 0.1, 0.2, 5.0, 9.5]), 10.0
    assert sample_frames(*clip, 10, "one-fps-uniform").tolist() == [0, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    assert sample_frames(*clip, 2, "segment-centers").tolist() == [2, 3]


def test_spans_do_not_depend_on_the_start_time_of_a_clip():
    times, duration = constant(100, 10.0)
    positions = sample_frames(times, duration, 5, "segment-centers", (3.0, 6.0))
    assert (positions - 30).tolist() == xpool_positions(30, 5)
    for sampling in ("one-fps-uniform", "segment-centers"):
        moved = sample_frames(times - 7.3, duration, 6, sampling, (2.0, 8.0))
        assert moved.tolist() == sample_frames(times, duration, 6, sampling, (2.0, 8.0)).tolist()
        assert set(sample_frames(times[::10], duration, 3, sampling, (4.4, 4.5)).tolist()) == {4}


NTSC = 30000 / 1001


@pytest.mark.parametrize(
    ("sampling", "count", "rate", "frames", "span", "expected"),
    [
        ("head", 600, 30, 4, None, [0, 30, 60, 90]),
        ("tail", 600, 30, 4, None, [480, 510, 540, 570]),
        ("one-fps-uniform", 600, 30, 4, None, [0, 180, 360, 570]),
        # 10.01 seconds contain the start of eleven of them.
        ("one-fps-uniform", 300, NTSC, 12, None, [0, 29, 59, 89, 119, 149, 179, 209, 239, 269, 299]),
        # 300 frames at 29.97 fps: a second of CLIP4Clip has 29 frames, a second of GARE 30.
        ("int-fps-uniform", 300, NTSC, 12, None, [0, 29, 58, 87, 116, 145, 174, 203, 232, 261, 290]),
        ("round-fps-uniform", 300, NTSC, 12, None, [0, 30, 60, 90, 120, 150, 180, 210, 240, 270]),
        ("round-fps-filled", 300, NTSC, 12, None, [0, 27, 54, 81, 108, 135, 163, 190, 217, 244, 271, 299]),
        ("round-fps-filled", 300, 20.0, 12, None, [0, 20, 40, 60, 100, 120, 140, 160, 200, 220, 240, 280]),
        ("round-fps-filled", 5, 5.0, 12, None, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4]),
        ("container-segments", 300, NTSC, 12, None, [12, 37, 62, 87, 112, 137, 162, 187, 212, 237, 262, 287]),
        # Both released rules read whole seconds and take the frame at the end of a span.
        ("int-fps-uniform", 300, NTSC, 12, (2.6, 5.0), [58, 87, 116, 145]),
        ("round-fps-uniform", 300, NTSC, 12, (2.6, 5.1), [59, 89, 119, 149]),
        ("int-fps-uniform", 300, NTSC, 12, (2.0, 2.9), [58, 87]),
        ("container-segments", 300, NTSC, 12, (0.0, 4.0), [4, 13, 23, 33, 43, 53, 63, 73, 83, 93, 103, 113]),
        ("container-segments", 2, 10.0, 4, None, [0, 1, 1, 1]),
        *((f"{rounding}-fps-uniform", 3, 0.4, 12, None, [0, 1, 2]) for rounding in ("int", "round")),  # steps >= 1
        *((f"{rounding}-fps-uniform", 400, 20.0, 2, None, [0, 380]) for rounding in ("int", "round")),
        ("uniform-floor", 100, 10.0, 5, (2.0, 4.0), [20, 24, 28, 32, 36]),
        ("one-fps-even", 100, 10.0, 8, (2.0, 7.0), [20, 36, 53, 69]),
        ("uniform-round", 100, 10.0, 3, (2.0, 4.0), [20, 30, 39]),
    ],
)
def test_frames_are_those_of_the_rule(sampling, count, rate, frames, span, expected):
    found = sample_frames(*constant(count, rate), frames, sampling, span, declared=Declared(rate, count))
    assert found.tolist() == expected


def test_released_segments_use_the_declared_number_of_frames():
    found = sample_frames(*constant(20, 10.0), 4, "container-segments", declared=Declared(10.0, 24))
    assert found.tolist() == [2, 8, 14, 19], "the last one would be frame 20"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": (3.0, 3.0)}, r"the span 3\.0 to 3\.0 s is invalid; expected 0 <= start < end"),
        ({"span": (-1.0, 3.0)}, "expected 0 <= start < end"),
        ({"sampling": "segment-random"}, "needs a random generator"),
    ],
)
def test_invalid_spans_and_a_missing_generator_are_refused(options, message):
    arguments = {"times": np.arange(10.0), "duration": 10.0, "frames": 4, "sampling": "segment-centers"} | options
    with pytest.raises(ValueError, match=message):
        sample_frames(**arguments)


@given(st.integers(2, 900), st.integers(1, 60), st.integers(4, 64))
@settings(max_examples=100, deadline=None)
def test_rules_of_vision_language_models_spread_over_the_whole_clip(count, rate, frames):
    clip = constant(count, float(rate))
    evenly = sample_frames(*clip, frames, "uniform-floor").tolist()
    assert evenly == ([i * count // frames for i in range(frames)] if count > frames else list(range(count)))
    found = sample_frames(*clip, frames, "one-fps-even").tolist()
    bounded = min(min(max(count / rate, 4), frames // 2 * 2), count)  # qwen-vl-utils' rule (`smart_nframes`)
    assert found == torch.linspace(0, count - 1, int(bounded // 2 * 2)).round().long().tolist()
    rounded = sample_frames(*clip, frames, "uniform-round").tolist()
    assert rounded == torch.linspace(0, count - 1, min(frames, count)).round().long().tolist()
    assert sample_frames(*constant(1, 10.0), frames, "one-fps-even").tolist() == [0]
