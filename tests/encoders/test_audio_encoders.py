"""Features of Whisper and wav2vec2 are the libraries' own, in the right frames; weights that do not fit say so."""

import json

import pytest
import torch
import whisper
from sound_files import burst, given_to, media_of, noise, silent_track, tone, track_of
from torch.nn import functional as F
from whisper.model import ModelDimensions, Whisper

from tvr_lightning.data.audio_alignment import AudioOptions
from tvr_lightning.data.batch import AudioInput, Media
from tvr_lightning.encoders import wav2vec2
from tvr_lightning.encoders.audio import pool_steps
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.wav2vec2 import TinyWav2Vec2Encoder, Wav2Vec2Encoder
from tvr_lightning.encoders.whisper import SIZES, TinyWhisperEncoder, WhisperEncoder
from tvr_lightning.features import VideoFeatures
from tvr_lightning.media.audio import read_audio

transformers = pytest.importorskip("transformers")
KINDS = ["whisper", "wav2vec2"]
FRAMES = 12


@pytest.fixture(scope="module")
def encoders():
    torch.manual_seed(0)
    return {"whisper": TinyWhisperEncoder(width=32, heads=2, layers=2), "wav2vec2": TinyWav2Vec2Encoder(width=32)}


def encoded(encoder, track, seconds, align="duration", frames=FRAMES, longest=60.0):
    """Features (F, D_a) of a clip, and the input that the encoder was given."""
    given = given_to(track, AudioOptions(encoder.kind, align, longest), seconds, frames)
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
def released(encoder, waveform):
    """What GAID's scripts compute from a waveform with the functions of the libraries."""
    if encoder.kind == "wav2vec2":
        hidden = library(encoder, waveform).permute(0, 2, 1)
        hidden = F.interpolate(hidden, size=1500, mode="linear", align_corners=True)
    else:
        picture = whisper.log_mel_spectrogram(waveform, n_mels=80)
        picture = F.pad(picture[:, :3000], (0, max(0, 3000 - picture.shape[1])))
        hidden = encoder.encoder(picture[None]).permute(0, 2, 1)
    return F.adaptive_avg_pool1d(hidden, FRAMES).permute(0, 2, 1)[0]


@pytest.mark.parametrize(("kind", "seconds"), [("whisper", 2.0), ("whisper", 10.0), ("whisper", 35.0), ("wav2vec2", 3)])
def test_clip30_equals_the_released_computation(encoders, kind, seconds):
    waveform = noise(seconds, mean=0.1, deviation=0.2)
    features, given = encoded(encoders[kind], track_of(waveform), seconds, "clip30")
    assert given.mask.all()
    assert torch.allclose(features, released(encoders[kind], waveform), atol=1e-5)


@pytest.mark.parametrize("seconds", [1.0, 4.7])
def test_duration_pools_the_librarys_hidden_states(encoders, seconds):
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
def test_real_sound_gives_the_librarys_features(encoders, test_data, kind, name):
    track = read_audio(test_data / "clips" / "videos" / name)
    features, given = encoded(encoders[kind], track, len(track.waveform) / 16_000)
    expected = pool_steps(library(encoders[kind], track.waveform), given.windows)[0]
    assert torch.allclose(features, expected, atol=1e-5)


@pytest.mark.parametrize("seconds", [1, 2, 13, 29, 31, 60])
def test_duration_changes_the_frames_in_which_a_burst_sounds(encoders, seconds):
    # Bursts are compared with one another: Whisper's log-mel lifts all silence of a clip towards its loudest moment.
    hiss = noise(seconds, deviation=0.02).numpy()
    features = {}
    for frame in (0, 6, 11):
        sound = hiss + burst(seconds, frame * seconds / FRAMES, (frame + 1) * seconds / FRAMES)
        features[frame] = encoded(encoders["whisper"], track_of(sound), seconds)[0]
    for one, other in ((0, 6), (6, 11), (11, 0)):
        change = (features[one] - features[other]).norm(dim=-1)
        assert set(change.topk(2).indices.tolist()) == {one, other}


@pytest.mark.parametrize("seconds", [1, 6, 17])
@pytest.mark.parametrize("frame", [0, 3, 5])
def test_a_burst_stands_out_in_its_own_frame(encoders, seconds, frame):
    hiss = noise(seconds, mean=0.01, deviation=0.02).numpy()
    sound = hiss + burst(seconds, frame * seconds / 6, (frame + 1) * seconds / 6)
    features, _ = encoded(encoders["wav2vec2"], track_of(sound), seconds, frames=6, longest=20.0)
    distance = (features - features.median(dim=0).values).norm(dim=-1)
    assert int(distance.argmax()) == frame


@pytest.mark.parametrize(("kind", "most", "lengths"), [("whisper", 60.0, (3, 50, 20)), ("wav2vec2", 10.0, (2, 7, 12))])
def test_clips_are_encoded_alike_alone_and_in_a_batch_and_silent_ones_are_zero(encoders, kind, most, lengths):
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
def test_digital_silence_and_the_shortest_sound_give_finite_vectors(encoders, kind, waveform, seconds):
    features, given = encoded(encoders[kind], track_of(waveform), seconds, frames=1)
    assert given.mask.all()
    assert torch.isfinite(features).all()
    assert features.any()


@pytest.mark.parametrize("kind", KINDS)
def test_neither_train_mode_nor_autocast_changes_frozen_features(encoders, kind):
    encoder, given = encoders[kind], media_of(given_to(track_of(noise(2.0)), AudioOptions(kind), 2.0))
    before = encoder.eval().encode_audio(given)[0]
    with torch.autocast("cpu", torch.bfloat16):
        after = encoder.train().encode_audio(given)[0]
    assert torch.equal(before, after)
    assert not after.requires_grad
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.parametrize(("kind", "other"), [KINDS, KINDS[::-1]])
def test_stored_audio_comes_back_unchanged_and_the_wrong_input_names_the_option(encoders, kind, other):
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


def test_fingerprint_follows_weights_and_shape():
    one, same, other, shape = (
        TinyWhisperEncoder(32, **options).fingerprint()
        for options in ({"seed": 0}, {"seed": 0}, {"seed": 1}, {"seed": 0, "heads": 4})
    )
    assert one == same
    assert len({one, other, shape}) == 3


def checkpoint(path, size):
    width, heads, layers = SIZES[size]
    dims = {
        "n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": width, "n_audio_head": heads, "n_audio_layer": layers,
        "n_vocab": 10, "n_text_ctx": 4, "n_text_state": 8, "n_text_head": 1, "n_text_layer": 1,
    }  # fmt: skip
    model = Whisper(ModelDimensions(**dims))
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    torch.save({"dims": dims, "model_state_dict": state}, path)
    return model


def test_a_checkpoint_of_openai_whisper_is_read_and_one_that_does_not_fit_is_described(tmp_path, monkeypatch):
    path = tmp_path / "base.pt"
    with pytest.raises(MissingWeightsError, match=r"Whisper base \(width 512, 6 layers\).*looked for .*base\.pt"):
        WhisperEncoder("base", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingWeightsError, match=f"looked for {tmp_path}/whisper/small.pt"):
        WhisperEncoder("small")
    model = checkpoint(path, "base")
    encoder = WhisperEncoder("base", str(path))
    assert encoder.dimension == 512
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(encoder.encoder.state_dict()[name], tensor.half().float())
    with pytest.raises(ValueError, match=r"not Whisper small: .*768, 12, 12.* found .*512, 8, 6.*'base': .512, 8, 6."):
        WhisperEncoder("small", str(path))
    content = torch.load(path, weights_only=True)
    del content["model_state_dict"]["encoder.ln_post.weight"]
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"Whisper base\) does not fit .* 1 missing: ln_post\.weight"):
        WhisperEncoder("base", str(path))
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not an openai-whisper checkpoint"):
        WhisperEncoder("base", str(path))
    path.write_bytes(b"not weights")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        WhisperEncoder("base", str(path))


@pytest.fixture
def small_sizes(monkeypatch):
    """The real sizes have 95 and 317 million weights; the files of tests contain two layers of the same layout."""
    monkeypatch.setitem(wav2vec2.SIZES, "base", (32, 2, 2))
    monkeypatch.setitem(wav2vec2.SIZES, "large", (48, 2, 3))


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("normalize", [None, True, False])
def test_a_folder_that_transformers_saved_is_read(tmp_path, encoders, normalize):
    encoders["wav2vec2"].model.save_pretrained(tmp_path)
    if normalize is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": normalize}), encoding="utf-8")
    track = track_of(noise(1.0, mean=0.1, deviation=0.2))
    read = (encoders["wav2vec2"], Wav2Vec2Encoder("base", str(tmp_path)))
    expected, found = (encoded(encoder, track, 1.0)[0] for encoder in read)
    assert torch.allclose(found, expected, atol=1e-5) is (normalize is not False)


@pytest.mark.usefixtures("small_sizes")
def test_absent_weights_and_those_of_another_size_are_described(tmp_path, encoders):
    with pytest.raises(MissingWeightsError, match=r"looked in .*nowhere.*hf download facebook/wav2vec2-base"):
        Wav2Vec2Encoder("base", str(tmp_path / "nowhere"))
    encoders["wav2vec2"].model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not wav2vec2 large: expected width 48 .* found width 32 .*size to .*base"):
        Wav2Vec2Encoder("large", str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MissingWeightsError, match=r"contains none of model\.safetensors, .* pytorch_model\.bin"):
        Wav2Vec2Encoder("base", str(tmp_path))


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize(("kind", "dimension"), [(WhisperEncoder, 512), (Wav2Vec2Encoder, 32)])
def test_random_weights_are_reported_loudly(caplog, kind, dimension):
    assert kind("base", "none").dimension == dimension
    assert any("RANDOM weights" in record.message for record in caplog.records)
