"""Positions of sampled frames: the authors' own rules at constant rates, equal times at variable ones."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvr_lightning.media.sampling import Declared, sample_frames
from tvr_lightning.option_types import FrameSampling

ALL = ("one-fps-uniform", "segment-centres", "segment-random", "head", "tail")


def constant(count: int, rate: float) -> tuple[np.ndarray, float]:
    return np.arange(count) / rate, count / rate


def clip4clip_positions(count: int, rate: int, frames: int) -> list[int]:
    """Frames of a whole-number rate as CLIP4Clip steps through them: one at the first frame of each second."""
    per_second = [second * rate for second in range(-(-count // rate) + 1) if second * rate < count]
    if len(per_second) <= frames:
        return per_second
    return [per_second[i] for i in np.linspace(0, len(per_second) - 1, frames, dtype=int)]


def xpool_positions(count: int, frames: int) -> list[int]:
    """Middles of equal segments by X-Pool's arithmetic, the last repeated."""
    edges = np.linspace(start=0, stop=count, num=min(frames, count) + 1).astype(int).tolist()
    middles = [(first + after - 1) // 2 for first, after in pairwise(edges)]
    return middles + middles[-1:] * (frames - len(middles))


@given(st.integers(1, 900), st.integers(1, 60), st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_one_per_second_equals_clip4clip(count: int, rate: int, frames: int) -> None:
    positions = sample_frames(*constant(count, rate), frames, "one-fps-uniform")
    assert positions.tolist() == clip4clip_positions(count, rate, frames)


@given(st.integers(1, 900), st.floats(1, 60), st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_segment_centres_equal_xpool(count: int, rate: float, frames: int) -> None:
    positions = sample_frames(*constant(count, rate), frames, "segment-centres")
    assert positions.tolist() == xpool_positions(count, frames)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_random_positions_stay_in_their_segments(count: int, frames: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    positions = sample_frames(*constant(count, 25.0), frames, "segment-random", generator=generator).tolist()
    taken = min(frames, count)
    edges = np.linspace(0, count, taken + 1).astype(int)
    assert all(edges[k] <= positions[k] < edges[k + 1] for k in range(taken))
    assert positions[taken:] == [positions[taken - 1]] * (frames - taken)
    drawn = [sample_frames(*constant(12, 4.0), 3, "segment-random", generator=generator).tolist() for _ in range(99)]
    assert {position for each in drawn for position in each} == set(range(12))


@given(
    st.sampled_from(ALL),
    st.lists(st.floats(0.001, 3), min_size=1, max_size=60),
    st.integers(1, 20),
    st.floats(0, 0.9),
    st.floats(0.05, 1),
)
@settings(max_examples=200, deadline=None)
def test_positions_rise_and_lie_in_the_span(
    sampling: FrameSampling, gaps: list[float], frames: int, begin: float, length: float
) -> None:
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


def test_head_and_tail_are_the_ends_of_the_one_per_second_frames() -> None:
    clip = constant(20 * 30, 30)
    assert sample_frames(*clip, 4, "head").tolist() == [0, 30, 60, 90]
    assert sample_frames(*clip, 4, "tail").tolist() == [480, 510, 540, 570]
    assert sample_frames(*clip, 4, "one-fps-uniform").tolist() == [0, 180, 360, 570]
    times, duration = constant(300, 30000 / 1001)
    positions = sample_frames(times, duration, 12, "one-fps-uniform")
    assert len(positions) == 11, "10.01 seconds begin eleven of them"
    assert np.abs(times[positions] - np.arange(11)).max() < 1 / 29


def test_variable_rate_takes_what_is_on_screen() -> None:
    times = np.array([0.0, 0.1, 0.2, 5.0, 9.5])
    assert sample_frames(times, 10.0, 10, "one-fps-uniform").tolist() == [0, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    assert sample_frames(times, 10.0, 2, "segment-centres").tolist() == [2, 3]


def test_spans_are_clips_of_their_own_wherever_times_begin() -> None:
    times, duration = constant(100, 10.0)
    positions = sample_frames(times, duration, 5, "segment-centres", (3.0, 6.0))
    assert (positions - 30).tolist() == xpool_positions(30, 5)
    for sampling in ("one-fps-uniform", "segment-centres"):
        moved = sample_frames(times - 7.3, duration, 6, sampling, (2.0, 8.0))
        assert moved.tolist() == sample_frames(times, duration, 6, sampling, (2.0, 8.0)).tolist()
        assert set(sample_frames(times[::10], duration, 3, sampling, (4.4, 4.5)).tolist()) == {4}


@pytest.mark.parametrize(
    ("sampling", "span", "positions"),
    [
        # 300 frames at 29.97 fps: a second of CLIP4Clip's is 29 frames, one of GARE's 30.
        ("int-fps-uniform", None, [0, 29, 58, 87, 116, 145, 174, 203, 232, 261, 290]),
        ("round-fps-uniform", None, [0, 30, 60, 90, 120, 150, 180, 210, 240, 270]),
        ("container-segments", None, [12, 37, 62, 87, 112, 137, 162, 187, 212, 237, 262, 287]),
        # Both released rules read whole seconds and take the frame at the end of a span.
        ("int-fps-uniform", (2.6, 5.0), [58, 87, 116, 145]),
        ("round-fps-uniform", (2.6, 5.1), [59, 89, 119, 149]),
        ("int-fps-uniform", (2.0, 2.9), [58, 87]),
        ("container-segments", (0.0, 4.0), [4, 13, 23, 33, 43, 53, 63, 73, 83, 93, 103, 113]),
    ],
)
def test_released_rules_count_frames(sampling: FrameSampling, span: tuple[float, float] | None, positions: list[int]):
    rate = 30000 / 1001
    found = sample_frames(*constant(300, rate), 12, sampling, span, declared=Declared(rate, 300))
    assert found.tolist() == positions


def test_released_segments_go_by_the_number_of_frames_that_the_container_states() -> None:
    found = sample_frames(*constant(20, 10.0), 4, "container-segments", declared=Declared(10.0, 24))
    assert found.tolist() == [2, 8, 14, 19], "the last one would be frame 20"
    few = sample_frames(*constant(2, 10.0), 4, "container-segments", declared=Declared(10.0, 2))
    assert few.tolist() == [0, 1, 1, 1]
    for sampling in ("int-fps-uniform", "round-fps-uniform"):  # steps are at least a frame
        assert sample_frames(*constant(3, 0.4), 12, sampling, declared=Declared(0.4, 3)).tolist() == [0, 1, 2]
        assert sample_frames(*constant(400, 20.0), 2, sampling, declared=Declared(20.0, 400)).tolist() == [0, 380]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": (3.0, 3.0)}, r"the span 3\.0 to 3\.0 s is invalid; expected 0 <= start < end"),
        ({"span": (-1.0, 3.0)}, "expected 0 <= start < end"),
        ({"sampling": "segment-random"}, "needs a random generator"),
    ],
)
def test_what_cannot_be_sampled_is_said(options: dict, message: str) -> None:
    arguments = {"times": np.arange(10.0), "duration": 10.0, "frames": 4, "sampling": "segment-centres"} | options
    with pytest.raises(ValueError, match=message):
        sample_frames(**arguments)
