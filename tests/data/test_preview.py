"""The page shows what a model is given: frames where they are, sound where it is, and nothing where there is none."""

import numpy as np
import pytest
from PIL import Image
from sound_files import burst, tone, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data.preview import preview
from tvr_lightning.media.container import VideoError


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def reddish(picture):
    return (picture[..., 0] > picture[..., 1] + 60) & (picture[..., 0] > picture[..., 2] + 60)


def test_the_page_is_a_picture_with_frames_waveform_and_log_mel(tmp_path):
    clip = write_clip(tmp_path / "clip.mkv", burst(4.0, 2.0, 3.0), seconds=4.0)
    preview(clip, tmp_path / "pages" / "page.png", frames=4)
    page = pixels(tmp_path / "pages" / "page.png")
    assert page.shape[0] > 600
    assert page.shape[1] > 1000
    grey = (np.abs(page - 128).max(axis=-1) < 6).mean()
    assert grey > 0.05, "the grey frames are on the page"
    wave = page[page.shape[0] // 2 : page.shape[0] * 3 // 4]
    columns = np.flatnonzero((wave.max(axis=-1) < 70).sum(axis=0) > 0.3 * len(wave))
    columns = columns[(columns > 0.1 * page.shape[1]) & (columns < 0.97 * page.shape[1])]
    assert len(columns) > 0.2 * page.shape[1] * 0.9, "one of four seconds is loud"
    assert columns.min() > 0.45 * page.shape[1]
    assert columns.max() < 0.82 * page.shape[1]


def test_a_broken_track_is_marked_in_red(tmp_path):
    sound = write_clip(tmp_path / "sound.mkv", tone(2.0), codec="aac")
    broken = write_clip(tmp_path / "broken.mkv", tone(2.0), codec="aac", spoil=lambda n: n > 10)
    red = []
    for clip in (sound, broken):
        preview(clip, tmp_path / "page.png", frames=2)
        red.append(int(reddish(pixels(tmp_path / "page.png")).sum()))
    assert red[0] < 20 < red[1]


def test_a_clip_without_sound_has_a_page_too_and_dollar_signs_are_no_formula(tmp_path):
    clip = write_clip(tmp_path / "costs $5 or $x_{2.mkv", None)
    preview(clip, tmp_path / "mute.svg", frames=2)
    assert "<!-- no audio track -->" in (tmp_path / "mute.svg").read_text(encoding="utf-8")
    preview(clip, tmp_path / "page.png", frames=2)
    assert (tmp_path / "page.png").is_file()


def test_what_is_no_video_and_another_suffix_are_named(tmp_path, capsys):
    letter = tmp_path / "letter.mp4"
    letter.write_text("no film", encoding="utf-8")
    with pytest.raises(VideoError, match=r"letter\.mp4"):
        preview(letter, tmp_path / "page.png", frames=2)
    assert not (tmp_path / "page.png").exists()
    assert main(["data", "show", str(letter), "--out", str(tmp_path / "page.xyz")]) == 2
    assert "page.xyz must end in .png, .pdf, or .svg" in capsys.readouterr().err
