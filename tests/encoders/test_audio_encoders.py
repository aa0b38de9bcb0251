"""Features of Whisper and wav2vec2 equal those of their libraries, and each frame gets the audio of its time."""

import json
from fractions import Fraction

import pytest
import torch
import whisper
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_files import burst, centers, given_to, media_of, noise, silent_track, tone, track_of, write_clip
from torch.nn import functional as F
from whisper.model import ModelDimensions, Whisper

from tvr_lightning.data.audio_alignment import AudioOptions, frame_cells, no_audio
from tvr_lightning.data.batch import AudioInput, Media
from tvr_lightning.data.readers import MediaReader
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders import wav2vec2
from tvr_lightning.encoders import whisper as whisper_encoder
from tvr_lightning.encoders.audio import pool_steps
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.wav2vec2 import TinyWav2Vec2Encoder, Wav2Vec2Encoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder, WhisperEncoder
from tvr_lightning.features import VideoFeatures
from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.preparation import Preparation

transformers = pytest.importorskip("transformers")
KINDS = ["whisper", "wav2vec2"]


@pytest.fixture(scope="module")
def encoders():
    torch.manual_seed(0)
    return {"whisper": TinyWhisperEncoder(width=32, heads=2, layers=2), "wav2vec2": TinyWav2Vec2Encoder(width=32)}


def encoded(encoder, track, seconds, align="duration", frames=12):
    """Features (F, D_a) of a clip, and the input of the encoder."""
    given = given_to(track, AudioOptions(encoder.kind, align, 60.0), seconds, frames)
    return encoder.encode_audio(media_of(given))[0][0], given


@torch.no_grad()
def library(encoder, waveform):
    """Hidden states (1, S, D_a) by the preparation and the model of openai-whisper or transformers."""
    waveform = torch.as_tensor(waveform)
    if encoder.kind == "wav2vec2":
        prepare = transformers.Wav2Vec2FeatureExtractor()
        values = prepare(waveform.numpy(), sampling_rate=16_000, return_tensors="pt").input_values
        return encoder.model.eval()(values).last_hidden_state
    dims = ModelDimensions(80, 1500, 32, 2, 2, 100, 8, 32, 2, 1)
    original = Whisper(dims).eval()
    original.encoder.load_state_dict(encoder.encoder.state_dict())
    return original.embed_audio(whisper.log_mel_spectrogram(whisper.pad_or_trim(waveform))[None])


@torch.no_grad()
def released(encoder, waveform, frames):
    """Features that GAID's scripts compute from a waveform with the functions of the libraries."""
    if encoder.kind == "wav2vec2":
        hidden = library(encoder, waveform).permute(0, 2, 1)
        hidden = F.interpolate(hidden, size=1500, mode="linear", align_corners=True)
    else:
        spectrogram = whisper.log_mel_spectrogram(F.pad(waveform, (0, max(0, 400 - len(waveform)))), n_mels=80)
        spectrogram = F.pad(spectrogram[:, :3000], (0, max(0, 3000 - spectrogram.shape[1])))
        hidden = encoder.encoder(spectrogram[None]).permute(0, 2, 1)
    return F.adaptive_avg_pool1d(hidden, frames).permute(0, 2, 1)[0]


@pytest.mark.parametrize(
    ("kind", "seconds", "frames"),
    [("whisper", 0.01, 1), ("whisper", 10.0, 12), ("whisper", 35.0, 7), ("wav2vec2", 3, 12), ("wav2vec2", 3, 7)],
)
def test_clip30_equals_the_released_computation(encoders, kind, seconds, frames):
    waveform = noise(seconds, mean=0.1, deviation=0.2)
    waveform[31 * 16_000 :] *= 1e4  # a maximum after the cut still scales the released spectrogram
    features, given = encoded(encoders[kind], track_of(waveform), seconds, "clip30", frames)
    assert given.mask.all()
    assert torch.allclose(features, released(encoders[kind], waveform, frames), atol=1e-5)


@pytest.mark.parametrize("seconds", [1.0, 4.7])
def test_duration_pools_the_hidden_states_of_the_library(encoders, seconds):
    waveform = noise(seconds, mean=0.1, deviation=0.2)
    features, given = encoded(encoders["wav2vec2"], track_of(waveform), seconds)
    hidden = library(encoders["wav2vec2"], waveform)
    assert given.steps.tolist() == [hidden.shape[1]]
    expected = torch.stack([hidden[0, a:b].mean(0) for a, b in given.windows[0].tolist()])
    assert torch.allclose(features, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("whisper", "jobs.mp4"), ("whisper", "00018.mp4"), ("whisper", "vgg_0nib7bMm8BA_15000_25000.mp4"),
     ("wav2vec2", "moviepy_example3.mp4")],
)  # fmt: skip
def test_features_of_real_audio_are_those_of_the_library(encoders, test_data, kind, name):
    track = read_audio(test_data / "clips" / "videos" / name)
    features, given = encoded(encoders[kind], track, len(track.waveform) / 16_000)
    expected = pool_steps(library(encoders[kind], track.waveform), given.windows)[0]
    assert torch.allclose(features, expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "most", "lengths"), [("whisper", 60.0, (3, 50, 20)), ("wav2vec2", 10.0, (2, 7, 12))])
def test_batches_do_not_change_features_and_silent_clips_are_zero(encoders, kind, most, lengths):
    encoder, options = encoders[kind], AudioOptions(kind, seconds=most)
    clips = [given_to(track_of(noise(length, seed)), options, length) for seed, length in enumerate(lengths)]
    clips.append(given_to(silent_track(1.0), options, 1.0))
    features, mask = encoder.encode_audio(media_of(AudioInput.cat(clips)))
    alone = torch.cat([encoder.encode_audio(media_of(clip))[0] for clip in clips])
    assert torch.allclose(features, alone, atol=1e-5 if kind == "whisper" else 0)
    assert mask.any(dim=1).tolist() == [True, True, True, False]
    assert [bool(clip.any()) for clip in features] == [True, True, True, False]


@pytest.mark.parametrize(
    ("kind", "waveform", "seconds"),
    [("whisper", 0 * tone(2.0), 2.0), ("wav2vec2", 0 * tone(1.0), 1.0), ("wav2vec2", noise(0.01), 0.01)],
)
def test_silence_and_very_short_audio_have_finite_features(encoders, kind, waveform, seconds):
    features, given = encoded(encoders[kind], track_of(waveform), seconds, frames=1)
    assert given.mask.all()
    assert torch.isfinite(features).all()
    assert features.any()


@pytest.mark.parametrize("kind", KINDS)
def test_train_mode_and_autocast_do_not_change_frozen_features(encoders, kind):
    encoder, given = encoders[kind], media_of(given_to(track_of(noise(2.0)), AudioOptions(kind), 2.0))
    before = encoder.eval().encode_audio(given)[0]
    with torch.autocast("cpu", torch.bfloat16):
        after = encoder.train().encode_audio(given)[0]
    assert torch.equal(before, after)
    assert not after.requires_grad
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.parametrize(("kind", "other"), [KINDS, KINDS[::-1]])
def test_stored_audio_is_returned_unchanged_and_wrong_input_is_refused(encoders, kind, other):
    encoder, stored = encoders[kind], VideoFeatures(torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"contain no audio\. Add it to the store"):
        encoder.encode_audio(stored)
    stored.audio, stored.audio_mask = torch.randn(2, 3, 32), torch.ones(2, 3, dtype=torch.bool)
    assert encoder.encode_audio(stored)[0] is stored.audio
    with pytest.raises(ValueError, match=rf"The data has no audio\. Set data\.init_args\.audio to {kind}"):
        encoder.encode_audio(Media(torch.zeros(1, 2, 3, 8, 8), torch.ones(1, 2, dtype=torch.bool)))
    given = given_to(track_of(tone(2.0)), AudioOptions(other), 2.0)
    with pytest.raises(ValueError, match=rf"the audio of {other}\. Set data\.init_args\.audio to {kind}"):
        encoder.encode_audio(media_of(given))


def test_the_fingerprint_depends_on_weights_and_sizes():
    one, same, other, shape = (
        TinyWhisperEncoder(32, **options).fingerprint()
        for options in ({"seed": 0}, {"seed": 0}, {"seed": 1}, {"seed": 0, "heads": 4})
    )
    assert one == same
    assert len({one, other, shape}) == 3


WHISPER, WAV2VEC2 = dict(whisper_encoder.SIZES), dict(wav2vec2.SIZES)


@pytest.fixture
def small_sizes(monkeypatch):
    """Sizes with two or three layers, instead of 20 to 317 million weights."""
    for sizes in (whisper_encoder.SIZES, wav2vec2.SIZES):
        for size, small in zip(sizes, ((32, 2, 2), (48, 2, 3)), strict=True):
            monkeypatch.setitem(sizes, size, small)


def test_sizes_are_those_of_the_papers():
    assert WHISPER == {"base": (512, 8, 6), "small": (768, 12, 12)}
    assert WAV2VEC2 == {"base": (768, 12, 12), "large": (1024, 16, 24)}


@pytest.mark.usefixtures("small_sizes")
def test_checkpoints_of_openai_whisper_are_read_or_refused(tmp_path, monkeypatch):
    path = tmp_path / "base.pt"
    with pytest.raises(MissingWeightsError, match=r"Whisper base \(width 32, 2 layers\).*looked for .*base\.pt"):
        WhisperEncoder("base", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingWeightsError, match=f"looked for {tmp_path}/whisper/small.pt"):
        WhisperEncoder("small")
    dims = ModelDimensions(80, 1500, 32, 2, 2, 10, 4, 8, 1, 1)
    model = Whisper(dims)
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    torch.save({"dims": vars(dims), "model_state_dict": state}, path)
    encoder = WhisperEncoder("base", str(path))
    assert encoder.dimension == 32
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(encoder.encoder.state_dict()[name], tensor.half().float())
    with pytest.raises(ValueError, match=r"not Whisper small: .*48, 2, 3.* found .*32, 2, 2.*'base': .32, 2, 2."):
        WhisperEncoder("small", str(path))
    content = torch.load(path, weights_only=True)
    del content["model_state_dict"]["encoder.ln_post.weight"]
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"Whisper base\) does not fit .* 1 missing: ln_post\.weight"):
        WhisperEncoder("base", str(path))
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not an openai-whisper checkpoint"):
        WhisperEncoder("base", str(path))


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("normalize", [None, True, False])
def test_folders_saved_by_transformers_are_read(tmp_path, encoders, normalize):
    encoders["wav2vec2"].model.save_pretrained(tmp_path)
    if normalize is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": normalize}), encoding="utf-8")
    track = track_of(noise(1.0, mean=0.1, deviation=0.2))
    read = (encoders["wav2vec2"], Wav2Vec2Encoder("base", str(tmp_path)))
    expected, found = (encoded(encoder, track, 1.0)[0] for encoder in read)
    assert torch.allclose(found, expected, atol=1e-5) is (normalize is not False)


@pytest.mark.usefixtures("small_sizes")
def test_missing_weights_and_weights_of_another_size_are_refused(tmp_path, encoders):
    with pytest.raises(MissingWeightsError, match=r"looked in .*nowhere.*hf download facebook/wav2vec2-base"):
        Wav2Vec2Encoder("base", str(tmp_path / "nowhere"))
    encoders["wav2vec2"].model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not wav2vec2 large: expected width 48 .* found width 32 .*size to .*base"):
        Wav2Vec2Encoder("large", str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MissingWeightsError, match=r"contains none of model\.safetensors, .* pytorch_model\.bin"):
        Wav2Vec2Encoder("base", str(tmp_path))


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("kind", [WhisperEncoder, Wav2Vec2Encoder])
def test_random_weights_are_reported(caplog, kind):
    assert kind("base", "none").dimension == 32
    assert "RANDOM weights" in caplog.text


FRAMES = 12


@pytest.mark.parametrize("seconds", [1, 29, 30, 31, 60])
@pytest.mark.parametrize("frame", [0, 5, 11])
def test_duration_assigns_a_burst_to_its_frame(seconds, frame):
    start, stop = (frame + 0.1) * seconds / FRAMES, (frame + 0.9) * seconds / FRAMES
    given = given_to(track_of(burst(seconds, start, stop)), AudioOptions("whisper"), seconds)
    # Loudness per 20 ms stands for an encoder.
    power = (10 ** (given.values * 4 - 4)).sum(dim=2).reshape(1, -1, 2).sum(dim=-1)
    pooled = pool_steps(power[..., None], given.windows)[0, :, 0]
    first, second = pooled.topk(2).values
    assert int(pooled.argmax()) == frame
    assert second < 0.1 * first


@pytest.mark.parametrize("seconds", [1.0, 30.0, 47.0])
def test_duration_uses_whispers_log_mel_in_windows(seconds):
    sound = noise(seconds, seed=1)
    given = given_to(track_of(sound), AudioOptions("whisper"), seconds)
    assert given.values.shape == (1, 2, 80, 3000)
    expected = whisper.log_mel_spectrogram(whisper.pad_or_trim(sound, 2 * whisper.audio.N_SAMPLES))
    assert torch.equal(torch.cat([*given.values[0]], dim=1), expected)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.5, 90.0), st.integers(1, 24))
def test_frames_at_segment_centers_divide_the_whole_clip(seconds, frames):
    cells = frame_cells(*centers(seconds, frames), seconds)
    assert cells[0, 0] == 0
    assert float(cells[-1, 1]) == pytest.approx(seconds, rel=1e-5)
    assert torch.allclose(cells[1:, 0], cells[:-1, 1])
    assert torch.allclose(cells[:, 1] - cells[:, 0], torch.full((frames,), seconds / frames).double(), rtol=1e-4)


@pytest.mark.parametrize(
    ("moments", "duration", "cells"),
    [
        ([0.0, 1.0, 2.0, None], 2.8, [[0.0, 0.5], [0.5, 1.5], [1.5, 2.8], [0.0, 0.0]]),
        ([0.0, 1.0, 1.0], 2.0, [[0.0, 0.5], [0.5, 2.0], [0.5, 2.0]]),
    ],
)
def test_each_moment_belongs_to_the_nearest_frame(moments, duration, cells):
    mask = torch.tensor([moment is not None for moment in moments])
    found = frame_cells(torch.tensor([moment or 0.0 for moment in moments]), mask, duration)
    assert torch.allclose(found, torch.tensor(cells).double())


def test_frames_without_audio_are_masked(tmp_path):
    path = write_clip(tmp_path / "late.mkv", tone(2.0), seconds=6.0, sound_start=2.5)
    given = given_to(read_audio(path, span=(0.0, 6.0)), AudioOptions("whisper"), 6.0, frames=6)
    assert given.mask.tolist() == [[False, False, True, True, True, False]]
    starts, stops = given.windows[0, 2:5].T
    assert starts.tolist() == pytest.approx([125, 150, 200], abs=1)
    assert stops.tolist() == pytest.approx([150, 200, 225], abs=1)


def test_frames_after_the_maximum_length_are_masked_with_one_notice(caplog):
    options = AudioOptions("whisper", seconds=7.5)
    for _ in range(2):
        given = given_to(track_of(tone(15.0)), options, 15.0)
    assert given.mask.tolist() == [[True] * 6 + [False] * 6]
    assert len([record for record in caplog.records if "7.5 s" in record.message]) == 1


@pytest.mark.parametrize("kind", ["whisper", "wav2vec2"])
@pytest.mark.parametrize("align", ["duration", "clip30"])
def test_a_silent_clip_is_zero_and_masked(kind, align):
    given = given_to(silent_track(3.0), AudioOptions(kind, align), 3.0)
    assert not given.mask.any()
    assert not given.values.any()
    heard = given_to(track_of(tone(5.0)), AudioOptions(kind, align), 5.0)
    assert heard.mask.all()
    both = AudioInput.cat([given, heard, no_audio(AudioOptions(kind, align), FRAMES)])
    assert len(both) == 2
    assert both.mask.any(dim=1).tolist() == [False, True]


def test_a_span_has_its_own_part_of_the_audio(tmp_path):
    path = write_clip(tmp_path / "span.mkv", burst(9.0, 6.0, 7.0), seconds=9.0)
    read = MediaReader(3, Preparation(32), "one-fps-uniform", audio=AudioOptions("wav2vec2", seconds=5.0))
    media = read(VideoRecord("span", path, (5.0, 8.0)), None)
    loud = media.audio.values[0].abs()
    assert (media.audio.samples.tolist(), media.problems) == ([48_000], [])
    assert (media.audio.windows.shape, media.audio.mask.shape) == ((1, 3, 2), (1, 3))
    assert float(loud[16_000:32_000].mean()) > 0.2
    assert not loud[:15_900].any()
    assert not loud[32_100:].any()
    nothing, some = read.empty().tensors(), media.tensors()
    assert [(0, *t.shape[1:]) for t in some] == [t.shape for t in nothing]


def test_a_span_starts_with_the_frame_on_screen(tmp_path):
    path = write_clip(tmp_path / "slow.mkv", tone(20.0), seconds=20.0, fps=Fraction(1, 4))  # frames at 0, 4, 8, ... s
    read = MediaReader(3, Preparation(32), "segment-centers", audio=AudioOptions("whisper"))
    for span, windows in (
        ((7.0, 15.0), [[0, 25], [25, 150], [150, 400]]),
        ((3.0, 8.0), [[0, 25], [25, 250], [25, 250]]),
    ):
        assert read(VideoRecord("slow", path, span), None).audio.windows[0].tolist() == windows


def test_a_broken_track_is_an_error_or_reported(tmp_path):
    path = write_clip(tmp_path / "broken.mkv", tone(3.0), seconds=3.0, codec="aac", spoil=lambda n: 10 <= n < 15)
    record, settings = VideoRecord("broken", path), (3, Preparation(32), "one-fps-uniform")
    with pytest.raises(MediaError, match=r"broken\.mkv: audio track"):
        MediaReader(*settings, audio=AudioOptions("whisper"))(record, None)
    media = MediaReader(*settings, audio=AudioOptions("whisper"), on_corrupt="skip")(record, None)
    (problem,) = media.problems
    assert "broken.mkv: audio track: 5 failures" in problem
