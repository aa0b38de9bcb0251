"""Grammar of sentences about a synthetic scene, with synonyms, word orders and optional facts."""

import itertools
import random
from dataclasses import dataclass

from tvr_lightning.synthetic.scene import Backdrop, Event, Figure, Scene

_MAIN = 0.7  # probability of the first of several synonyms

_SHAPES = {
    "circle": ("circle", "disc"), "square": ("square", "box"), "triangle": ("triangle", "wedge"),
    "star": ("star",), "cross": ("cross", "plus sign"), "ring": ("ring", "hoop"),
}  # fmt: skip
_COLORS = {
    "red": ("red", "crimson"), "green": ("green",), "blue": ("blue",), "yellow": ("yellow", "golden"),
    "purple": ("purple", "violet"), "orange": ("orange",),
}  # fmt: skip
_SIZES = {"large": ("large", "big"), "small": ("small", "little")}
_MOTIONS = {
    "right": ("moves to the right", "slides right", "glides from left to right"),
    "left": ("moves to the left", "slides left", "glides from right to left"),
    "up": ("moves up", "rises", "floats upwards"),
    "down": ("moves down", "falls", "sinks"),
    "grow": ("grows", "gets bigger", "expands"),
    "shrink": ("shrinks", "gets smaller", "contracts"),
    "spin": ("spins", "rotates", "turns around"),
    "blink": ("blinks", "flashes", "flickers"),
    "bounce": ("bounces", "hops", "jumps up and down"),
    "shake": ("shakes", "trembles", "wobbles"),
}
_PATTERNS = {
    "plain": ("a plain {} background", "a {} background"),
    "striped": ("a {} striped background", "a background with {} stripes"),
    "checkered": ("a {} checkered background", "a {} checkerboard"),
    "dotted": ("a {} dotted background", "a {} background with dots"),
}
_SOUNDS = {
    "low hum": ("a low hum", "a deep steady tone"),
    "high hum": ("a high hum", "a shrill steady tone"),
    "slow low beeps": ("slow low beeps", "slow deep beeping"),
    "slow high beeps": ("slow high beeps", "slow shrill beeping"),
    "fast low beeps": ("fast low beeps", "rapid deep beeping"),
    "fast high beeps": ("fast high beeps", "rapid shrill beeping"),
    "rising sweep": ("a rising whistle", "a siren going up"),
    "falling sweep": ("a falling whistle", "a siren going down"),
    "hiss": ("a hiss", "static noise"),
    "silence": ("silence", "no sound"),
}
_TWO = ("{} and then {}", "first {} then {}", "{} before {}", "{} followed by a moment when {}")
_SOUND_ONLY = ("{} can be heard", "the sound is {}", "we hear {}", "a video with {}")


@dataclass(frozen=True)
class Caption:
    """Sentence about a scene.

    Attributes:
        text: Text in lower case, without a period.
        kind: Kind of caption: "full" (all events in order), "event1", "event2", ... (only that event) or "sound"
            (nothing visible).
        mentions: Facts in the sentence: "shape", "color", "motion" (of its events), "size", "backdrop", "sound". The
            sentence does not exclude facts that it omits.
    """

    text: str
    kind: str
    mentions: tuple[str, ...]


def full_caption(scene: Scene, rng: random.Random, *, backdrop: float = 0.6, sound: float = 0.4) -> Caption:
    """Describe all events in order, with each optional fact at the given probability (1: always)."""
    sizes, where, heard = rng.random() < 0.3, rng.random() < backdrop, rng.random() < sound
    events = _sequence(scene.events, rng, sizes)
    return _finish(events, "full", scene, rng, sizes, _backdrop(scene.backdrop, rng) if where else "", heard)


def event_caption(
    scene: Scene, number: int, rng: random.Random, *, backdrop: float = 0.5, size: float = 0.3
) -> Caption:
    """Describe one event, counted from 1, without the others."""
    sizes, where = rng.random() < size, rng.random() < backdrop
    place = _backdrop(scene.backdrop, rng) if where else ""
    clause = _clause(scene.events[number - 1], rng, sizes)
    return _finish(clause, f"event{number}", scene, rng, sizes, place)


def sound_caption(scene: Scene, rng: random.Random) -> Caption:
    """Describe only the audio."""
    return Caption(rng.choice(_SOUND_ONLY).format(_sound(scene, rng)), "sound", ("sound",))


def captions(scene: Scene, count: int, rng: random.Random) -> list[Caption]:
    """Describe a scene in `count` sentences: most with all events, the last quarter or more with one event or audio.

    Of twenty, twelve are full, six describe one event and two the audio. Texts can repeat, as in real datasets.
    """
    heard = count // 10
    single = 3 * count // 10
    sentences = [full_caption(scene, rng) for _ in range(count - heard - single)]
    sentences += [event_caption(scene, index % len(scene.events) + 1, rng) for index in range(single)]
    return sentences + [sound_caption(scene, rng) for _ in range(heard)]


def query(scene: Scene, rng: random.Random) -> Caption:
    """Describe a scene in a test sentence: seven in eight describe all events, one in eight a single one.

    A scene with a twin always gets a full sentence with its audio, which is the only difference between the two.
    """
    if scene.twin is not None:
        return full_caption(scene, rng, backdrop=0.5, sound=1.0)
    if rng.random() < 1 / 8:
        return event_caption(scene, rng.randint(1, len(scene.events)), rng, backdrop=1.0, size=1.0)
    return full_caption(scene, rng, backdrop=0.8)


def paragraph(scene: Scene, rng: random.Random) -> list[Caption]:
    """Describe each event in a separate sentence, in order, then the audio (half of the time; always for twins)."""
    sentences = [event_caption(scene, number, rng, backdrop=0.2) for number in range(1, len(scene.events) + 1)]
    if scene.twin is not None or rng.random() < 0.5:
        sentences.append(sound_caption(scene, rng))
    return sentences


def describe_scene(scene: Scene) -> str:
    """Describe all facts of a scene in one sentence without synonyms, so that equal scenes have equal sentences."""
    plain = _FirstChoice()
    events = ", then ".join(_clause(event, plain, True) for event in scene.events)
    return f"{events}, on {_backdrop(scene.backdrop, plain)}, with {_sound(scene, plain)}"


def describe_event(event: Event) -> str:
    """Describe all facts of one event without synonyms."""
    return _clause(event, _FirstChoice(), True)


def describe_segment(scene: Scene, start: float, end: float) -> str:
    """Describe without synonyms the backdrop and the longest event between the seconds `start` and `end`."""
    event = max(scene.events, key=lambda event: min(event.end, end) - max(event.start, start))
    return f"{describe_event(event)} on {_backdrop(scene.backdrop, _FirstChoice())}"


class _FirstChoice(random.Random):
    """Random generator that always selects the first synonym."""

    def random(self) -> float:
        return 0.0


def _pick(options: tuple[str, ...], rng: random.Random) -> str:
    return options[0] if len(options) == 1 or rng.random() < _MAIN else rng.choice(options[1:])


def _figure(figure: Figure, rng: random.Random, sizes: bool) -> str:
    words = [_pick(_SIZES[figure.size], rng)] if sizes else []
    words += [_pick(_COLORS[figure.color], rng), _pick(_SHAPES[figure.shape], rng)]
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def _clause(event: Event, rng: random.Random, sizes: bool) -> str:
    return f"{_figure(event.figure, rng, sizes)} {_pick(_MOTIONS[event.motion], rng)}"


def _sequence(events: tuple[Event, ...], rng: random.Random, sizes: bool) -> str:
    clauses = [_clause(events[0], rng, sizes)]
    for before, event in itertools.pairwise(events):
        if event.figure == before.figure:
            clauses.append(f"it {_pick(_MOTIONS[event.motion], rng)}")
        else:
            clauses.append(_clause(event, rng, sizes))
    if len(clauses) == 2:
        order = rng.random()
        if order < 0.15:
            return f"after {clauses[0]} {clauses[1]}"
        if order < 0.3 and events[0].figure != events[1].figure:  # "it" must follow the noun that it refers to
            return f"{clauses[1]} after {clauses[0]}"
        return _pick(_TWO, rng).format(*clauses)
    return f"{clauses[0]}, " + ", ".join(f"then {clause}" for clause in clauses[1:])


def _backdrop(backdrop: Backdrop, rng: random.Random) -> str:
    return _pick(_PATTERNS[backdrop.pattern], rng).format(backdrop.color)


def _sound(scene: Scene, rng: random.Random) -> str:
    return _pick(_SOUNDS[scene.sound], rng)


def _finish(
    text: str, kind: str, scene: Scene, rng: random.Random, sizes: bool, place: str, heard: bool = False
) -> Caption:
    if place:
        text = f"on {place} {text}" if rng.random() < 0.3 else f"{text} on {place}"
    if heard:
        joint = "with" if scene.sound == "silence" else _pick(("with", "to the sound of"), rng)
        text += f" {joint} {_sound(scene, rng)}"
    optional = {"size": sizes, "backdrop": bool(place), "sound": heard}
    return Caption(text, kind, ("shape", "color", "motion", *(name for name, told in optional.items() if told)))
