"""Scenes of synthetic videos, with figures moving in successive events, a backdrop and audio, and their sampling."""

import random
from dataclasses import dataclass, replace

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLORS = ("red", "green", "blue", "yellow", "purple", "orange")
SIZES = ("large", "small")
MOTIONS = ("right", "left", "up", "down", "grow", "shrink", "spin", "blink", "bounce", "shake")
BACKDROP_COLORS = ("white", "black", "grey", "brown", "pink", "teal")
PATTERNS = ("plain", "striped", "checkered", "dotted")
SOUNDS = (
    "low hum", "high hum", "slow low beeps", "slow high beeps", "fast low beeps", "fast high beeps",
    "rising sweep", "falling sweep", "hiss", "silence",
)  # fmt: skip

ROUND = ("circle", "ring")  # look the same while they spin
RESERVED_SHARE = 5  # one in five pairs of figures is reserved for held-out videos
SAME_FIGURE = 0.2  # share of scenes in which one figure makes all events
TWIN_SHARE = 0.2  # share of videos that differ from a second video only in audio
TRACKLESS = 0.4  # share of silent scenes written without an audio track


@dataclass(frozen=True)
class Figure:
    """One moving object."""

    shape: str
    color: str
    size: str


@dataclass(frozen=True)
class Event:
    """One motion of a figure from `start` to `end` in seconds, around `place` (x, y as shares of the frame)."""

    figure: Figure
    motion: str
    start: float
    end: float
    place: tuple[float, float]


@dataclass(frozen=True)
class Backdrop:
    """Background of the whole video."""

    color: str
    pattern: str


@dataclass(frozen=True)
class Scene:
    """Complete content of a synthetic video.

    Attributes:
        events: Successive events without gaps, from time 0 to the end of the video.
        backdrop: Color and pattern of the background.
        sound: Audio of the whole video.
        audio_track: Whether there is an audio track; False for some silent videos.
        shade: Brightness of the whole video, 0.85 to 1; an irrelevant factor that captions do not describe.
        held_out: Whether the first two figures are a pair that does not occur in this order in training videos.
        twin: Position in the dataset's list of scenes of the video that differs only in audio, or None.
    """

    events: tuple[Event, ...]
    backdrop: Backdrop
    sound: str
    audio_track: bool
    shade: float
    held_out: bool
    twin: int | None = None

    @property
    def duration(self) -> float:
        """Duration of the scene in seconds."""
        return self.events[-1].end

    def look(self) -> tuple[object, ...]:
        """Return the visible facts without times and places: equal for twins, different for all other pairs."""
        return (self.backdrop, *((event.figure, event.motion) for event in self.events))


@dataclass(frozen=True)
class Timing:
    """Number of events per video, and their duration: `least` to `most` steps of `step` seconds."""

    events: tuple[int, int]
    least: int
    most: int
    step: float


def reserved(first: Figure, second: Figure) -> bool:
    """Return whether an ordered pair of figures is reserved for held-out videos; each figure occurs in both kinds."""
    code = (SHAPES.index(f.shape) + 2 * COLORS.index(f.color) for f in (first, second))
    return sum(weight * value for weight, value in zip((1, 3), code, strict=True)) % RESERVED_SHARE == 0


def draw_scenes(
    name: str, count: int, timing: Timing, *, held_out: bool, seen: set[tuple[object, ...]], offset: int
) -> list[Scene]:
    """Sample the scenes of one part of a dataset.

    Args:
        name: Name of the random stream; equal names yield equal scenes.
        count: Number of scenes.
        timing: Number and length of the events.
        held_out: Whether to sample only reserved pairs of figures, or none of them.
        seen: Existing looks, extended in place, so that only twins look the same.
        offset: Position of the part's first scene in the dataset, for `Scene.twin`.

    Returns:
        `count` scenes; some neighbors are twins.
    """
    rng = random.Random(name)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = _draw(rng, timing, held_out)
        if scene.look() in seen:
            continue
        seen.add(scene.look())
        here = offset + len(scenes)
        if count - len(scenes) >= 2 and rng.random() < TWIN_SHARE / (2 - TWIN_SHARE):  # such a draw makes two
            other = rng.choice([sound for sound in SOUNDS if sound != scene.sound])
            scenes.append(replace(scene, twin=here + 1))
            scenes.append(replace(_with_sound(scene, other, rng), twin=here))
        else:
            scenes.append(scene)
    return scenes


def _draw(rng: random.Random, timing: Timing, held_out: bool) -> Scene:
    number = rng.randint(*timing.events)
    while True:
        first = _figure(rng)
        figures = (
            [first] * number if rng.random() < SAME_FIGURE else [first, *(_figure(rng) for _ in range(number - 1))]
        )
        if reserved(figures[0], figures[1]) == held_out:
            break
    events: list[Event] = []
    start = 0.0
    for figure in figures:
        before = events[-1] if events else None
        taken = before.motion if before and before.figure == figure else None  # otherwise two events look like one
        motions = [m for m in MOTIONS if m != taken and not (m == "spin" and figure.shape in ROUND)]
        end = round(start + timing.step * rng.randint(timing.least, timing.most), 3)
        place = (round(rng.uniform(0.45, 0.55), 3), round(rng.uniform(0.45, 0.55), 3))
        events.append(Event(figure, rng.choice(motions), start, end, place))
        start = end
    scene = Scene(
        events=tuple(events),
        backdrop=Backdrop(rng.choice(BACKDROP_COLORS), rng.choice(PATTERNS)),
        sound="silence",
        audio_track=True,
        shade=round(rng.uniform(0.85, 1.0), 3),
        held_out=held_out,
    )
    return _with_sound(scene, rng.choice(SOUNDS), rng)


def _figure(rng: random.Random) -> Figure:
    return Figure(rng.choice(SHAPES), rng.choice(COLORS), rng.choice(SIZES))


def _with_sound(scene: Scene, sound: str, rng: random.Random) -> Scene:
    return replace(scene, sound=sound, audio_track=sound != "silence" or rng.random() >= TRACKLESS)
