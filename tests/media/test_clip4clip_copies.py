"""Copies like those of CLIP4Clip's script: FFmpeg's frames, in its sizes.

The expected frames are those that FFmpeg n9.0.2 (`-map 0:v:0 -r 3 -f framemd5`) takes of the same files.
"""

from fractions import Fraction

import av
import pytest
import torch
from broken_videos import numbers_of, write_sound, write_video

from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.clip4clip_copies import clip4clip_size, constant_rate_frames
from tvr_lightning.media.compression import Compression, compress, verify_copy
from tvr_lightning.media.container import VideoError

LIKE = Compression(like="clip4clip")
NTSC_FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)
VARIABLE = [0, 100, 200, 700, 800, 2200, 2300, 2340, 2380, 3500, 3900, 4000, 4600, 4700, 4800, 4900]
LATE = [900 + time for time in VARIABLE]


def frames_of(path) -> torch.Tensor:
    with av.open(str(path)) as container:
        return torch.stack([torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("10.mp4", {"rate": 10, "frames": 40}, [0, 1, 2, 6, 9, 12, 16, 19, 22, 26, 29, 32, 36, 39]),
        ("23.976.mp4", {"rate": NTSC_FILM, "frames": 90}, [0, 1, 7, 15, 23, 31, 39, 47, 55, 63, 71, 79, 87]),
        ("25.mp4", {"rate": 25, "frames": 90}, [0, 1, 7, 15, 24, 32, 40, 49, 57, 65, 74, 82]),
        ("29.97.mp4", {"rate": NTSC, "frames": 110}, [0, 1, 8, 18, 28, 38, 48, 58, 68, 78, 88, 98, 108]),
        ("30.mp4", {"rate": 30, "frames": 130}, [0, 1, 8, 18, 28, 38, 48, 58, 68, 78, 88, 98, 108, 118, 128]),
        ("50.mp4", {"rate": 50, "frames": 160}, [0, 1, 14, 31, 48, 64, 81, 98, 114, 131, 148]),
        ("2.mp4", {"rate": 2, "frames": 9}, [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]),
        ("variable.mp4", {"stamps": VARIABLE}, [0, 1, 2, 3, 4, 4, 5, 6, 6, 6, 6, 9, 10, 10, 10, 12, 15]),
        ("after-its-sound.mp4", {"stamps": LATE, "sound": 5.0},
         [0, 0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 6, 6, 6, 9, 10, 10, 10, 13, 15]),
        ("stamps-go-back.avi", {"rate": 25, "options": {"bf": "2"}}, [0, 1, 5, 13, 22, 30, 38, 47, 55]),
    ],
)  # fmt: skip
def test_a_copy_consists_of_the_frames_that_ffmpeg_takes(tmp_path, name, options, expected):
    path = write_video(tmp_path / name, **{"frames": len(options.get("stamps", range(60))), **options})
    frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in constant_rate_frames(path, 3)]
    assert numbers_of(torch.stack(frames).permute(0, 3, 1, 2)) == expected


def test_the_written_copy_shows_them_enlarged_at_3_frames_a_second_with_their_sound(tmp_path):
    path = write_video(tmp_path / "small.mp4", 90, rate=25, sound=3.6)
    made = compress(path, LIKE)
    (tmp_path / "copy.mp4").write_bytes(made.content)
    verify_copy(tmp_path / "copy.mp4", made)
    frames = frames_of(tmp_path / "copy.mp4")
    assert frames.shape == (12, 224, 224, 3)
    assert numbers_of(frames.permute(0, 3, 1, 2)) == [0, 1, 7, 15, 24, 32, 40, 49, 57, 65, 74, 82]
    assert (made.duration, made.notes) == (4.0, [])
    assert read_audio(tmp_path / "copy.mp4").present
    turned = compress(write_video(tmp_path / "turned.mp4", 20, size=(128, 96), rotation=90), LIKE)
    (tmp_path / "copy.mp4").write_bytes(turned.content)
    assert frames_of(tmp_path / "copy.mp4").shape[1:3] == (168, 224), "as it is shown"
    with pytest.raises(VideoError, match="has no video stream"):
        compress(write_sound(tmp_path / "sound.m4a"), LIKE)


@pytest.mark.parametrize(
    ("size", "expected"),  # sizes that FFmpeg n9.0.2 gives with the script's filter
    [((320, 240), (298, 224)), ((100, 30), (746, 224)), ((200, 200), (224, 224)), ((240, 320), (224, 168))],
)
def test_sizes_are_the_script_s_which_squashes_portrait_videos(size, expected):
    assert clip4clip_size(*size) == expected


@pytest.mark.parametrize(
    "other", [{"fps": 4}, {"size": 256}, {"frames": "jpeg"}, {"interpolation": "bilinear"}, {"like": "somebody"}]
)
def test_other_options_contradict_it(other):
    with pytest.raises(ValueError, match="like") as error:
        Compression(**{"like": "clip4clip", **other})
    assert "\n" not in str(error.value)
