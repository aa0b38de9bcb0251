"""Still pictures: one file's pixels, upright and in RGB, and nothing that a few kilobytes could unfold to."""

from __future__ import annotations

import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from tvr_lightning.media.opening import MediaError

PICTURE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")
"""Pillow's names of what is read; none of them leads to another file."""
MAX_PICTURE_PIXELS = 2**26
"""Largest picture, 8192 x 8192: beyond what a camera of 50 million pixels writes."""


class PictureError(MediaError):
    """A file that holds no picture that can be read."""


def read_picture(path: str | Path) -> Image.Image:
    """Read a picture file; of an animation its first picture.

    Args:
        path: the file; what it is, its bytes decide and not its name.

    Returns:
        The picture of mode RGB, turned as its EXIF entry says, transparent parts white.

    Raises:
        PictureError: it is none of `PICTURE_FORMATS`, broken, or larger than `MAX_PICTURE_PIXELS`.
    """
    path = Path(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=[name for name in PICTURE_FORMATS if name in _known()]) as opened:
                width, height = opened.size
                if width * height > MAX_PICTURE_PIXELS:
                    raise PictureError(path, _too_large(f"has {width:,} x {height:,} pixels"))
                opened.load()
                upright = ImageOps.exif_transpose(opened)
                if upright.has_transparency_data:
                    ground = Image.new("RGBA", upright.size, "white")
                    upright = Image.alpha_composite(ground, upright.convert("RGBA"))
                return upright.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(path, _too_large("has more pixels than that")) from error
    except UnidentifiedImageError as error:
        raise PictureError(path, f"is not in a supported image format: {', '.join(PICTURE_FORMATS)}") from error
    except MediaError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # as Pillow's readers report broken files
        raise PictureError(path, f"cannot be read as an image ({str(error) or type(error).__name__})") from error


def _known() -> set[str]:
    Image.init()
    return set(Image.OPEN)


def _too_large(found: str) -> str:
    return f"{found}; the maximum is {MAX_PICTURE_PIXELS:,}, 8192 x 8192"
