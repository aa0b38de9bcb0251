"""wav2vec2's features are transformers' own, clip by clip; weights that do not fit say so."""

import json

import numpy as np
import pytest
import torch
from sound_files import burst
from torch.nn import functional as F

from tvr_lightning.data.audio_alignment import AudioOptions, audio_input
from tvr_lightning.data.batch import AudioInput, Media
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.wav2vec2 import SIZES, TinyWav2Vec2Encoder, Wav2Vec2Encoder
from tvr_lightning.media.audio import AudioTrack, read_audio

transformers = pytest.importorskip("transformers")
FRAMES = 6


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(1)
    return TinyWav2Vec2Encoder(width=32)


def track_of(waveform):
    waveform = np.asarray(waveform, dtype=np.float32).reshape(-1)
    return AudioTrack(waveform, np.ones(-(-len(waveform) // 320), dtype=bool))


def given_to(track, options, seconds, frames=FRAMES):
    moments = (torch.arange(frames) + 0.5) * seconds / frames
    return audio_input(track, options, moments, torch.ones(frames, dtype=torch.bool), seconds)


def media_of(audio):
    count, frames = audio.windows.shape[:2]
    return Media(torch.zeros(count, frames, 3, 8, 8, dtype=torch.uint8), torch.ones(count, frames, dtype=bool), audio)


@torch.no_grad()
def library(encoder, waveform):
    """Hidden states (1, S, D_a) by transformers' own preparation and model."""
    prepare = transformers.Wav2Vec2FeatureExtractor()
    values = prepare(waveform, sampling_rate=16_000, return_tensors="pt").input_values
    return encoder.model.eval()(values).last_hidden_state


def noise(seconds, seed=0):
    return np.random.default_rng(seed).normal(0.1, 0.2, round(seconds * 16_000)).astype(np.float32)


@pytest.mark.parametrize("seconds", [1.0, 4.7])
def test_duration_pools_the_librarys_hidden_states(encoder, seconds):
    given = given_to(track_of(noise(seconds)), AudioOptions("wav2vec2"), seconds)
    hidden = library(encoder, noise(seconds))
    assert given.steps.tolist() == [hidden.shape[1]]
    expected = torch.stack([hidden[0, a:b].mean(0) for a, b in given.windows[0].tolist()])
    assert torch.allclose(encoder.encode_audio(media_of(given))[0][0], expected, atol=1e-5)


def test_clip30_stretches_to_1500_as_the_released_code_does(encoder):
    given = given_to(track_of(noise(3.0)), AudioOptions("wav2vec2", "clip30"), 3.0)
    hidden = library(encoder, noise(3.0)).permute(0, 2, 1)
    stretched = F.interpolate(hidden, size=1500, mode="linear", align_corners=True)
    released = F.adaptive_avg_pool1d(stretched, FRAMES).permute(0, 2, 1)
    assert torch.allclose(encoder.encode_audio(media_of(given))[0], released, atol=1e-5)


def test_real_sound_gives_the_librarys_features(encoder, test_data):
    track = read_audio(test_data / "clips" / "videos" / "moviepy_example3.mp4")
    seconds = len(track.waveform) / 16_000
    given = given_to(track, AudioOptions("wav2vec2"), seconds)
    hidden = library(encoder, track.waveform)
    expected = torch.stack([hidden[0, a:b].mean(0) for a, b in given.windows[0].tolist()])
    assert torch.allclose(encoder.encode_audio(media_of(given))[0][0], expected, atol=1e-5)


@pytest.mark.parametrize("seconds", [1, 6, 17])
@pytest.mark.parametrize("frame", [0, 3, 5])
def test_a_burst_stands_out_in_its_own_frame(encoder, seconds, frame):
    start, stop = frame * seconds / FRAMES, (frame + 1) * seconds / FRAMES
    sound = 0.1 * noise(seconds) + burst(seconds, start, stop)
    given = given_to(track_of(sound), AudioOptions("wav2vec2", seconds=20.0), seconds)
    features = encoder.encode_audio(media_of(given))[0][0]
    distance = (features - features.median(dim=0).values).norm(dim=-1)
    assert int(distance.argmax()) == frame


def test_clips_of_different_lengths_do_not_change_each_other(encoder):
    options = AudioOptions("wav2vec2", seconds=10.0)
    clips = [given_to(track_of(noise(s, seed)), options, s) for seed, s in enumerate((2.0, 7.0, 12.0))]
    silent = AudioTrack(np.zeros(16_000, np.float32), np.zeros(50, dtype=bool))
    clips.append(given_to(silent, options, 1.0))
    features, mask = encoder.encode_audio(media_of(AudioInput.cat(clips)))
    alone = torch.cat([encoder.encode_audio(media_of(clip))[0] for clip in clips])
    assert torch.equal(features, alone)
    assert mask.any(dim=1).tolist() == [True, True, True, False]
    assert not features[3].any()


def test_a_sound_shorter_than_one_step_still_gives_a_vector(encoder):
    given = given_to(track_of(noise(0.01)), AudioOptions("wav2vec2"), 0.01, frames=1)
    features, mask = encoder.encode_audio(media_of(given))
    assert mask.tolist() == [[True]]
    assert torch.isfinite(features).all()
    assert features.any()


def test_digital_silence_is_heard_as_finite_numbers(encoder):
    given = given_to(track_of(np.zeros(16_000)), AudioOptions("wav2vec2"), 1.0)
    assert torch.isfinite(encoder.encode_audio(media_of(given))[0]).all()


def test_train_mode_neither_drops_nor_asks_for_gradients(encoder):
    given = media_of(given_to(track_of(noise(2.0)), AudioOptions("wav2vec2"), 2.0))
    before = encoder.eval().encode_audio(given)[0]
    after = encoder.train().encode_audio(given)[0]
    assert torch.equal(before, after)
    assert not after.requires_grad
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_log_mel_input_names_the_option(encoder):
    given = given_to(track_of(noise(1.0)), AudioOptions("whisper"), 1.0)
    with pytest.raises(ValueError, match=r"the audio of whisper\. Set data\.init_args\.audio to wav2vec2"):
        encoder.encode_audio(media_of(given))


@pytest.fixture
def small_sizes(monkeypatch):
    """The real sizes have 95 and 317 million weights; the files of tests hold two layers of the same layout."""
    monkeypatch.setitem(SIZES, "base", (32, 2, 2))
    monkeypatch.setitem(SIZES, "large", (48, 2, 3))


def saved(folder, encoder, normalize=None):
    encoder.model.save_pretrained(folder)
    if normalize is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps({"do_normalize": normalize}), encoding="utf-8")
    return str(folder)


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("normalize", [None, True, False])
def test_a_folder_that_transformers_saved_is_read(tmp_path, encoder, normalize):
    loaded = Wav2Vec2Encoder("base", saved(tmp_path, encoder, normalize))
    given = media_of(given_to(track_of(noise(1.0)), AudioOptions("wav2vec2"), 1.0))
    same = torch.allclose(loaded.encode_audio(given)[0], encoder.encode_audio(given)[0], atol=1e-5)
    assert same is (normalize is not False)


@pytest.mark.usefixtures("small_sizes")
def test_weights_of_another_size_say_expected_and_found(tmp_path, encoder):
    with pytest.raises(ValueError, match=r"not wav2vec2 large: expected width 48 .* found width 32 .*size to .*base"):
        Wav2Vec2Encoder("large", saved(tmp_path, encoder))


@pytest.mark.usefixtures("small_sizes")
def test_absent_weights_say_where_they_were_looked_for(tmp_path, encoder):
    with pytest.raises(MissingWeightsError, match=r"looked in .*nowhere.*hf download facebook/wav2vec2-base"):
        Wav2Vec2Encoder("base", str(tmp_path / "nowhere"))
    saved(tmp_path, encoder)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MissingWeightsError, match=r"contains none of model\.safetensors, .* pytorch_model\.bin"):
        Wav2Vec2Encoder("base", str(tmp_path))


@pytest.mark.usefixtures("small_sizes")
def test_random_weights_are_said_loudly(caplog):
    assert Wav2Vec2Encoder("base", "none").dimension == 32
    assert any("RANDOM weights" in record.message for record in caplog.records)
