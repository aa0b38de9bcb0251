"""Images of frames: every pixel is written, at every width, and is the one that PyAV's own conversion gives."""

import av
import numpy as np
import pytest
from broken_videos import write_video

from tvr_lightning.media.decoder import FrameConverter
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import read_clip

HEIGHT = 14


def poison_memory(size):
    """Fill memory of about this size with a value and free it, so that bytes never written stand out."""
    for value in (0x55, 0xAA):
        blocks = [np.full(size, value, dtype=np.uint8) for _ in range(4)]
        del blocks


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuvj420p", "yuv422p"])
def test_images_equal_to_image_at_every_width(pixel_format, tmp_path):
    random = np.random.default_rng(0)
    wrong, to_image = [], FrameConverter(tmp_path)
    for width in range(16, 1301):
        frame = av.VideoFrame(width, HEIGHT, pixel_format)
        for plane in frame.planes:
            plane.update(random.integers(0, 256, plane.buffer_size, dtype=np.uint8).tobytes())
        poison_memory(4 * width * HEIGHT)
        if not np.array_equal(np.asarray(to_image(frame)), np.asarray(frame.to_image())):
            wrong.append(width)
    assert not wrong


@pytest.mark.parametrize("width", [162, 180, 338, 340, 404, 500])
def test_two_reads_of_a_file_are_equal(tmp_path, width):
    path = write_video(tmp_path / "portrait.mp4", 20, size=(width, 2 * width))
    reads = []
    for _ in range(2):
        poison_memory(4 * width * 2 * width)
        reads.append(read_clip(path, frames=4, image_size=64).pixels.numpy())
    np.testing.assert_array_equal(*reads)
    crop = Preparation(64)
    with av.open(str(path)) as container:
        first = next(container.decode(video=0)).to_image()
    np.testing.assert_array_equal(reads[0][0], np.asarray(crop(first)).transpose(2, 0, 1))
