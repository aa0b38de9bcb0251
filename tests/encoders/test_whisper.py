"""Whisper's features are openai-whisper's own, in the right frames; weights that do not fit say so."""

import numpy as np
import pytest
import torch
import whisper
from sound_files import burst, tone
from torch.nn import functional as F
from whisper.model import ModelDimensions, Whisper

from tvr_lightning.data.audio_alignment import AudioOptions, audio_input
from tvr_lightning.data.batch import AudioInput, Media
from tvr_lightning.encoders.audio import pool_steps
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.whisper import SIZES, TinyWhisperEncoder, WhisperEncoder
from tvr_lightning.features import VideoFeatures
from tvr_lightning.media.audio import AudioTrack, read_audio

FRAMES = 12


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return TinyWhisperEncoder(width=32, heads=2, layers=2)


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
def released(encoder, waveform, frames):
    """What GAID's scripts compute from a waveform, with openai-whisper's functions."""
    picture = whisper.log_mel_spectrogram(waveform, n_mels=80)
    picture = F.pad(picture[:, :3000], (0, max(0, 3000 - picture.shape[1])))
    features = encoder.encoder(picture[None])
    return F.adaptive_avg_pool1d(features.permute(0, 2, 1), frames).permute(0, 2, 1)


@pytest.mark.parametrize("seconds", [2.0, 10.0, 35.0])
def test_clip30_equals_the_released_computation(encoder, seconds):
    waveform = torch.from_numpy(tone(seconds)[0])
    given = given_to(track_of(waveform), AudioOptions("whisper", "clip30"), seconds)
    features, mask = encoder.encode_audio(media_of(given))
    assert mask.all()
    assert torch.allclose(features, released(encoder, waveform, FRAMES), atol=1e-5)


def test_real_sound_gives_openai_whispers_features(test_data):
    torch.manual_seed(0)
    dims = ModelDimensions(80, 1500, 32, 2, 2, 100, 8, 32, 2, 1)
    original = Whisper(dims).eval()
    encoder = TinyWhisperEncoder(32, 2, 2)
    encoder.encoder.load_state_dict(original.encoder.state_dict())
    for name in ("jobs.mp4", "00018.mp4", "vgg_0nib7bMm8BA_15000_25000.mp4"):
        track = read_audio(test_data / "clips" / "videos" / name)
        seconds = len(track.waveform) / 16_000
        given = given_to(track, AudioOptions("whisper"), seconds)
        with torch.no_grad():
            picture = whisper.log_mel_spectrogram(whisper.pad_or_trim(torch.from_numpy(track.waveform)))
            expected = pool_steps(original.embed_audio(picture[None]), given.windows)
        assert torch.allclose(encoder.encode_audio(media_of(given))[0], expected, atol=1e-5)


@pytest.mark.parametrize("seconds", [1, 2, 5, 13, 29, 31, 44, 60])
def test_duration_changes_the_frames_in_which_a_burst_sounds(encoder, seconds):
    # Bursts are compared with one another: Whisper's log-mel lifts all silence of a clip towards its loudest moment.
    hiss = np.random.default_rng(0).normal(0, 0.02, (1, round(seconds * 16_000)))
    features = {}
    for frame in (0, 6, 11):
        sound = track_of(hiss + burst(seconds, frame * seconds / FRAMES, (frame + 1) * seconds / FRAMES))
        features[frame] = encoder.encode_audio(media_of(given_to(sound, AudioOptions("whisper"), seconds)))[0][0]
    for one, other in ((0, 6), (6, 11), (11, 0)):
        change = (features[one] - features[other]).norm(dim=-1)
        assert set(change.topk(2).indices.tolist()) == {one, other}


def test_clips_are_encoded_alike_alone_and_in_a_batch(encoder):
    options = AudioOptions("whisper")
    lengths = (3.0, 50.0, 20.0)
    clips = [given_to(track_of(tone(seconds, frequency=300 + 50 * seconds)), options, seconds) for seconds in lengths]
    together = encoder.encode_audio(media_of(AudioInput.cat(clips)))[0]
    alone = torch.cat([encoder.encode_audio(media_of(clip))[0] for clip in clips])
    assert torch.allclose(together, alone, atol=1e-5)


def test_without_sound_the_vectors_are_zero(encoder):
    silent = AudioTrack(np.zeros(32_000, np.float32), np.zeros(100, dtype=bool))
    given = AudioInput.cat([given_to(t, AudioOptions("whisper"), 2.0) for t in (silent, track_of(tone(2.0)))])
    features, mask = encoder.encode_audio(media_of(given))
    assert mask.any(dim=1).tolist() == [False, True]
    assert not features[0].any()
    assert features[1].abs().min(dim=-1).values.max() > 0
    assert not encoder.encode_audio(media_of(given[:1]))[0].any()


def test_digital_silence_is_heard_as_finite_numbers(encoder):
    given = given_to(track_of(0 * tone(2.0)), AudioOptions("whisper"), 2.0)
    features, mask = encoder.encode_audio(media_of(given))
    assert mask.all()
    assert torch.isfinite(features).all()


def test_stored_audio_comes_back_unchanged(encoder):
    stored = VideoFeatures(torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"contain no audio\. Add it to the store"):
        encoder.encode_audio(stored)
    stored.audio, stored.audio_mask = torch.randn(2, 3, 32), torch.ones(2, 3, dtype=torch.bool)
    assert encoder.encode_audio(stored)[0] is stored.audio


def test_media_without_sound_or_with_the_wrong_input_name_the_option(encoder):
    with pytest.raises(ValueError, match=r"data\.init_args\.audio to whisper"):
        encoder.encode_audio(Media(torch.zeros(1, 2, 3, 8, 8), torch.ones(1, 2, dtype=torch.bool)))
    waveform = given_to(track_of(tone(2.0)), AudioOptions("wav2vec2"), 2.0)
    with pytest.raises(ValueError, match=r"has the audio of wav2vec2\. Set .* to whisper"):
        encoder.encode_audio(media_of(waveform))


def test_it_never_trains_and_train_mode_changes_nothing(encoder):
    given = media_of(given_to(track_of(tone(2.0)), AudioOptions("whisper"), 2.0))
    before = encoder.eval().encode_audio(given)[0]
    after = encoder.train().encode_audio(given)[0]
    assert torch.equal(before, after)
    assert not after.requires_grad
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_autocast_leaves_the_features_as_a_store_holds_them(encoder):
    given = media_of(given_to(track_of(tone(2.0)), AudioOptions("whisper"), 2.0))
    with torch.autocast("cpu", torch.bfloat16):
        inside = encoder.encode_audio(given)[0]
    assert torch.equal(inside, encoder.encode_audio(given)[0])


def test_fingerprint_follows_weights_and_shape():
    torch.manual_seed(0)
    one = TinyWhisperEncoder(32)
    torch.manual_seed(0)
    assert TinyWhisperEncoder(32).fingerprint() == one.fingerprint()
    torch.manual_seed(0)
    assert TinyWhisperEncoder(32, heads=4).fingerprint() != one.fingerprint()
    torch.manual_seed(1)
    assert TinyWhisperEncoder(32).fingerprint() != one.fingerprint()
    seeded = TinyWhisperEncoder(32, seed=0).fingerprint()
    torch.rand(1)
    assert TinyWhisperEncoder(32, seed=0).fingerprint() == seeded
    assert TinyWhisperEncoder(32, seed=1).fingerprint() != seeded


def checkpoint(path, size, **changes):
    width, heads, layers = SIZES[size]
    dims = {
        "n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": width, "n_audio_head": heads, "n_audio_layer": layers,
        "n_vocab": 10, "n_text_ctx": 4, "n_text_state": 8, "n_text_head": 1, "n_text_layer": 1,
    }  # fmt: skip
    model = Whisper(ModelDimensions(**dims))
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    torch.save({"dims": {**dims, **changes}, "model_state_dict": state}, path)
    return model


def test_a_checkpoint_of_openai_whisper_is_read(tmp_path):
    model = checkpoint(tmp_path / "base.pt", "base")
    encoder = WhisperEncoder("base", str(tmp_path / "base.pt"))
    assert encoder.dimension == 512
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(encoder.encoder.state_dict()[name], tensor.half().float())


def test_weights_of_another_size_say_expected_and_found(tmp_path):
    checkpoint(tmp_path / "x.pt", "base")
    with pytest.raises(ValueError, match=r"not Whisper small: .*768, 12, 12.* found .*512, 8, 6.*'base': .512, 8, 6."):
        WhisperEncoder("small", str(tmp_path / "x.pt"))


def test_absent_weights_say_where_they_were_looked_for(tmp_path, monkeypatch):
    with pytest.raises(MissingWeightsError, match=r"Whisper base \(width 512, 6 layers\).*looked for .*nowhere\.pt"):
        WhisperEncoder("base", str(tmp_path / "nowhere.pt"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingWeightsError, match=f"looked for {tmp_path}/whisper/small.pt"):
        WhisperEncoder("small")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not weights", "cannot be read as weights"),
        ({"a": torch.zeros(1)}, "not an openai-whisper checkpoint"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, content, message):
    path = tmp_path / "other.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        WhisperEncoder("base", str(path))


def test_an_incomplete_checkpoint_names_the_tensors(tmp_path):
    checkpoint(tmp_path / "base.pt", "base")
    content = torch.load(tmp_path / "base.pt", weights_only=True)
    del content["model_state_dict"]["encoder.ln_post.weight"]
    torch.save(content, tmp_path / "base.pt")
    with pytest.raises(ValueError, match=r"Whisper base\) does not fit .* 1 missing: ln_post\.weight"):
        WhisperEncoder("base", str(tmp_path / "base.pt"))


def test_random_weights_are_said_loudly(caplog):
    encoder = WhisperEncoder("base", "none")
    assert encoder.dimension == 512
    assert any("RANDOM weights" in record.message for record in caplog.records)
