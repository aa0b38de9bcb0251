"""Rendering of the frames of a synthetic scene with numpy."""

import math

import numpy as np
import numpy.typing as npt

from tvr_lightning.synthetic.scene import Backdrop, Event, Scene

WIDTH, HEIGHT = 112, 96  # not square, so that a center crop has an effect

Pixels = npt.NDArray[np.uint8]
Plane = npt.NDArray[np.float32]

_RGB = {
    "red": (225, 25, 25), "green": (20, 165, 40), "blue": (30, 60, 235), "yellow": (250, 225, 20),
    "purple": (145, 30, 190), "orange": (250, 130, 10), "white": (245, 245, 245), "black": (25, 25, 25),
    "grey": (140, 140, 140), "brown": (110, 65, 30), "pink": (250, 175, 200), "teal": (70, 165, 165),
}  # fmt: skip
_RADIUS = {"large": 27.0, "small": 19.0}  # pixels
_OUTLINE = 2.5  # pixels; separates a figure from a backdrop of similar brightness


def render(scene: Scene, fps: int) -> Pixels:
    """Return all frames of a scene, (T, HEIGHT, WIDTH, 3) uint8 RGB; frame t shows the time t / fps."""
    times = np.arange(round(scene.duration * fps), dtype=np.float32) / np.float32(fps)
    behind = _backdrop(scene.backdrop) * np.float32(scene.shade)
    frames = np.broadcast_to(np.round(behind).astype(np.uint8), (len(times), HEIGHT, WIDTH, 3)).copy()
    for event in scene.events:
        first, last = (int(index) for index in np.searchsorted(times, (event.start - 1e-4, event.end - 1e-4)))
        _draw(event, times[first:last] - np.float32(event.start), frames[first:last], behind, scene.shade)
    return frames


def _backdrop(backdrop: Backdrop) -> Plane:
    """Return the backdrop (HEIGHT, WIDTH, 3) as float32 in 0..255."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    if backdrop.pattern == "striped":
        marked = (y // 8) % 2 == 1
    elif backdrop.pattern == "checkered":
        marked = (x // 16 + y // 16) % 2 == 1
    elif backdrop.pattern == "dotted":
        marked = (x % 16 - 8) ** 2 + (y % 16 - 8) ** 2 < 20
    else:
        marked = np.zeros((HEIGHT, WIDTH), dtype=bool)
    base = np.array(_RGB[backdrop.color], dtype=np.float32)
    other = base * 0.55 if base.mean() > 100 else base * 0.5 + 90  # darker marks on light, lighter marks on dark
    return np.where(marked[..., None], other, base).astype(np.float32)


def _draw(event: Event, seconds: Plane, frames: Pixels, behind: Plane, shade: float) -> None:
    """Draw a figure into frames (T, HEIGHT, WIDTH, 3) at (T,) seconds after the start of the event."""
    x, y, scale, angle, visible = _pose(event.motion, seconds, event.end - event.start)
    x, y, radius = x + event.place[0] * WIDTH, y + event.place[1] * HEIGHT, _RADIUS[event.figure.size] * scale
    reach = 1.25 * radius + 1  # the corners of a square; only this box of the frames changes
    left, right = max(0, math.floor((x - reach).min())), math.ceil((x + reach).max()) + 1
    top, bottom = max(0, math.floor((y - reach).min())), math.ceil((y + reach).max()) + 1
    behind = behind[top:bottom, left:right]
    column = np.arange(left, left + behind.shape[1], dtype=np.float32)[None, None, :] - x[:, None, None]
    row = np.arange(top, top + behind.shape[0], dtype=np.float32)[None, :, None] - y[:, None, None]
    cosine, sine, radius = np.cos(angle)[:, None, None], np.sin(angle)[:, None, None], radius[:, None, None]
    u, v = (column * cosine + row * sine) / radius, (row * cosine - column * sine) / radius
    distance = _distance(event.figure.shape, u, v) * radius  # pixels outside the figure's edge, negative inside
    fill = np.clip(0.5 - distance - _OUTLINE, 0, 1)[..., None] * visible[:, None, None, None]
    line = np.clip(0.5 - distance, 0, 1)[..., None] * visible[:, None, None, None]
    ink = np.array(_RGB[event.figure.color], dtype=np.float32) * np.float32(shade)
    outlined = behind * (1 - line) + np.float32(10 if behind.mean() > 90 else 245 * shade) * line
    frames[:, top:bottom, left:right] = np.round(outlined * (1 - fill) + ink * fill)


def _pose(motion: str, t: Plane, length: float) -> tuple[Plane, Plane, Plane, Plane, Plane]:
    """Return offsets x, y in pixels, scale, angle in radians and visibility, (T,) each, at `t` of `length` seconds."""
    zero, one = np.zeros_like(t), np.ones_like(t)
    along = (t / length).astype(np.float32)
    if motion in ("right", "left"):
        return (along - 0.5) * (40 if motion == "right" else -40), zero, one, zero, one
    if motion in ("up", "down"):
        return zero, (along - 0.5) * (40 if motion == "down" else -40), one, zero, one
    if motion in ("grow", "shrink"):
        return zero, zero, 0.6 + 0.7 * (along if motion == "grow" else 1 - along), zero, one
    if motion == "spin":
        return zero, zero, one, t * np.float32(math.radians(100)), one
    if motion == "blink":
        return zero, zero, one, zero, ((t % 0.8) < 0.5).astype(np.float32)
    if motion == "bounce":
        return zero, -20 * np.abs(np.sin(t * np.float32(4.4))) + 8, one, zero, one
    return 7 * np.sin(t * np.float32(19.0)), zero, one, 0.25 * np.sin(t * np.float32(19.0)), one  # shake


def _distance(shape: str, u: Plane, v: Plane) -> Plane:
    """Return the approximate signed distance of points (u, v) from the edge of a shape of radius 1; v points down."""
    if shape == "circle":
        return np.hypot(u, v) - np.float32(0.95)
    if shape == "ring":
        return np.abs(np.hypot(u, v) - np.float32(0.72)) - np.float32(0.28)
    u, side = np.abs(u), np.abs(v)
    if shape == "square":
        return np.maximum(u, side) - np.float32(0.85)
    if shape == "cross":
        upright = np.maximum(u - np.float32(0.34), side - 1)
        across = np.maximum(side - np.float32(0.34), u - 1)
        return np.asarray(np.minimum(upright, across), np.float32)
    if shape == "triangle":
        edge = (np.float32(math.sin(math.radians(60))) * u) - np.float32(0.5) * v - np.float32(0.5)
        return np.asarray(np.maximum(edge, v - np.float32(0.75)), np.float32)
    return _star(u, v)


def _star(u: Plane, v: Plane) -> Plane:
    """Return the distance from a five-pointed star with a tip at the top; `u` is already folded to its right half."""
    fifth = 2 * math.pi / 5
    turn = np.arctan2(u, -v)  # 0 at the upper tip, increasing clockwise
    folded = np.abs((turn + fifth / 2) % fifth - fifth / 2).astype(np.float32)  # 0 at a tip, fifth / 2 at a notch
    length = np.hypot(u, v)
    tip, notch = np.array([1.0, 0.0]), 0.45 * np.array([math.cos(fifth / 2), math.sin(fifth / 2)])
    normal = np.array([notch[1] - tip[1], tip[0] - notch[0]]) / np.hypot(*(notch - tip))
    along, aside = length * np.cos(folded), length * np.sin(folded)
    distance: Plane = (along * normal[0] + aside * normal[1] - normal @ tip).astype(np.float32)
    return distance
