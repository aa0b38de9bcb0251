"""Chinese captions of a synthetic scene, for VATEX."""

import random

from tvr_lightning.synthetic.grammar import Caption
from tvr_lightning.synthetic.scene import Event, Scene

_COMMA = "\N{FULLWIDTH COMMA}"
_SHAPES = {"circle": "圆形", "square": "方块", "triangle": "三角形", "star": "星形", "cross": "十字", "ring": "圆环"}
_COLORS = {
    "red": "红色", "green": "绿色", "blue": "蓝色", "yellow": "黄色", "purple": "紫色", "orange": "橙色",
    "white": "白色", "black": "黑色", "grey": "灰色", "brown": "棕色", "pink": "粉色", "teal": "青色",
}  # fmt: skip
_SIZES = {"large": "大", "small": "小"}
_MOTIONS = {
    "right": ("向右移动", "向右滑动"), "left": ("向左移动", "向左滑动"), "up": ("向上移动", "上升"),
    "down": ("向下移动", "下降"), "grow": ("变大", "扩大"), "shrink": ("变小", "缩小"), "spin": ("旋转", "转动"),
    "blink": ("闪烁", "一闪一闪"), "bounce": ("弹跳", "上下跳动"), "shake": ("晃动", "颤抖"),
}  # fmt: skip
_PATTERNS = {"plain": "纯{}", "striped": "{}条纹", "checkered": "{}棋盘格", "dotted": "{}圆点"}
_SOUNDS = {
    "low hum": "低沉的嗡嗡声", "high hum": "尖锐的嗡嗡声", "slow low beeps": "缓慢低沉的哔哔声",
    "slow high beeps": "缓慢尖锐的哔哔声", "fast low beeps": "快速低沉的哔哔声", "fast high beeps": "快速尖锐的哔哔声",
    "rising sweep": "逐渐升高的哨声", "falling sweep": "逐渐降低的哨声", "hiss": "嘶嘶声",
}  # fmt: skip


def chinese_caption(scene: Scene, rng: random.Random) -> Caption:
    """Describe all events in order; backdrop, audio and sizes are optional, but twins always have their audio."""
    sizes, where = rng.random() < 0.3, rng.random() < 0.6
    heard = scene.twin is not None or rng.random() < 0.4
    clauses = [_clause(event, rng, sizes) for event in scene.events]
    joint = rng.choice(("然后", "接着", "随后"))
    text = f"{_COMMA}{joint}".join(clauses)
    if where:
        backdrop = _PATTERNS[scene.backdrop.pattern].format(_COLORS[scene.backdrop.color])
        text = f"在{backdrop}背景上{_COMMA}{text}" if rng.random() < 0.5 else f"{text}{_COMMA}背景是{backdrop}"
    if heard:
        text += f"{_COMMA}没有声音" if scene.sound == "silence" else f"{_COMMA}伴有{_SOUNDS[scene.sound]}"
    optional = (("size", sizes), ("backdrop", where), ("sound", heard))
    return Caption(text, "full", ("shape", "color", "motion", *(name for name, sentences in optional if sentences)))


def _clause(event: Event, rng: random.Random, sizes: bool) -> str:
    size = _SIZES[event.figure.size] if sizes else ""
    return f"一个{_COLORS[event.figure.color]}的{size}{_SHAPES[event.figure.shape]}{rng.choice(_MOTIONS[event.motion])}"
