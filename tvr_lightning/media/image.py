"""Image files: the pixels of one file, upright and in RGB, with a limit on the size after decompression."""

from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from tvr_lightning.media.container import MediaError

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")  # Pillow's names; none references other files
MAX_IMAGE_PIXELS = 2**26  # 8192 x 8192, larger than the images of a 50-megapixel camera


class ImageError(MediaError):
    """A file that contains no readable image."""


def read_image(path: str | Path) -> Image.Image:
    """Read an image file, or the first image of an animation, in a format of `IMAGE_FORMATS` given by its content.

    Returns:
        The image in mode RGB, rotated according to its EXIF entry, with transparent parts in white.
    """
    path = Path(path)
    Image.init()
    try:
        with Image.open(path, formats=[name for name in IMAGE_FORMATS if name in Image.OPEN]) as opened:
            width, height = opened.size
            if width * height > MAX_IMAGE_PIXELS:
                limit = f"the maximum is {MAX_IMAGE_PIXELS:,}, 8192 x 8192"
                raise ImageError(path, f"has {width:,} x {height:,} pixels; {limit}")
            opened.load()
            upright = ImageOps.exif_transpose(opened)
            if upright.has_transparency_data:
                ground = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(ground, upright.convert("RGBA"))
            return upright.convert("RGB")
    except MediaError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(path, f"is not in a supported image format: {', '.join(IMAGE_FORMATS)}") from error
    except Exception as error:  # Pillow's decoders raise errors of many classes for damaged files
        raise ImageError(path, f"cannot be read as an image ({str(error) or type(error).__name__})") from error
