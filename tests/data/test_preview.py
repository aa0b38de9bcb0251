"""The preview shows the frames and the audio that a model receives."""

import numpy as np
import pytest
from PIL import Image
from sound_files import burst, tone, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data.preview import preview


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def test_the_page_shows_frames_and_the_waveform(tmp_path):
    clip = write_clip(tmp_path / "clip.mkv", burst(4.0, 2.0, 3.0), seconds=4.0)
    preview(clip, tmp_path / "pages" / "page.png", frames=4)
    page = pixels(tmp_path / "pages" / "page.png")
    height, width, _ = page.shape
    assert (np.abs(page - 128).max(axis=-1) < 6).mean() > 0.05, "the gray frames are on the page"
    wave = page[height // 2 : height * 3 // 4]
    columns = np.flatnonzero((wave.max(axis=-1) < 70).sum(axis=0) > 0.3 * len(wave))
    columns = columns[(columns > 0.1 * width) & (columns < 0.97 * width)]
    assert len(columns) > 0.18 * width, "one of four seconds is loud"
    assert 0.45 * width < columns.min() < columns.max() < 0.82 * width


def test_a_broken_audio_track_is_marked_in_red(tmp_path):
    red = []
    for first_broken in (1000, 11):
        clip = write_clip(tmp_path / "clip.mkv", tone(2.0), codec="aac", spoil=lambda n, f=first_broken: n >= f)
        preview(clip, tmp_path / "page.png", frames=2)
        page = pixels(tmp_path / "page.png")
        red.append(int((page[..., 0] > page[..., 1:].max(axis=-1) + 60).sum()))
    assert red[0] < 20 < red[1]


def test_clips_without_audio_and_with_dollar_signs_in_their_name_have_a_page(tmp_path):
    clip = write_clip(tmp_path / "costs $5 or $x_{2.mkv", None)
    preview(clip, tmp_path / "mute.svg", frames=2)
    assert "<!-- no audio track -->" in (tmp_path / "mute.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "message"), [("page.png", "letter.mp4"), ("page.xyz", "page.xyz must end in .png, .pdf, or .svg")]
)
def test_other_files_and_suffixes_are_refused(tmp_path, capsys, name, message):
    (tmp_path / "letter.mp4").write_text("not a video")
    assert main(["data", "show", str(tmp_path / "letter.mp4"), "--out", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / name).exists()
