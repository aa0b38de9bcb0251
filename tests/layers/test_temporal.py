import pytest
import torch
from safetensors.torch import load_file

from tvr_lightning.encoders.base import TemporalInitialization
from tvr_lightning.layers.temporal import TemporalLSTM, TemporalTransformer, initialize


def authors_mean_similarity(case, frames):
    """CLIP4Clip's loose similarity from its text and temporal features: masked mean of unit frames, cosine, scale."""
    mask = case["input.video_mask"].float().unsqueeze(-1)
    frames = frames / frames.norm(dim=-1, keepdim=True)
    video = (frames * mask).sum(1) / mask.sum(1)
    video = video / video.norm(dim=-1, keepdim=True)
    text = case["feature.sentence"]
    text = text / text.norm(dim=-1, keepdim=True)
    return case["checkpoint.clip.logit_scale"].exp() * text @ video.T


def transformer_of(case):
    names = {
        key.removeprefix("checkpoint.transformerClip."): value for key, value in case.items() if "rmerClip." in key
    }
    state = names | {"frame_position_embeddings.weight": case["checkpoint.frame_position_embeddings.weight"]}
    encoder = TemporalTransformer(64, layers=1, frames=40)
    encoder.load_state_dict(state)
    return encoder.requires_grad_(False).eval()


def lstm_of(case):
    encoder = TemporalLSTM(64)
    encoder.load_state_dict({k.removeprefix("checkpoint."): v for k, v in case.items() if "checkpoint.lstm" in k})
    return encoder


@pytest.mark.parametrize("name", ["tcmgc", "tcmgc_lambda10"])
def test_transformer_matches_released_features(parity_cases, name):
    case = load_file(parity_cases / f"{name}.safetensors")
    output = transformer_of(case)(case["feature.frames"], case["input.video_mask"])
    torch.testing.assert_close(output, case["feature.temporal_frames"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "build"), [("seqTransf", transformer_of), ("seqLSTM", lstm_of)])
def test_similarities_are_the_released_ones(parity_cases, name, build):
    case = load_file(parity_cases / f"clip4clip_{name}.safetensors")
    output = build(case)(case["feature.frames"], case["input.video_mask"])
    torch.testing.assert_close(authors_mean_similarity(case, output), case["expected.similarity"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("encoder", [TemporalTransformer(32, layers=2, heads=4, frames=8), TemporalLSTM(32, layers=2)])
def test_padding_does_not_change_real_frames_and_a_video_without_frames_stays_finite(encoder):
    torch.manual_seed(0)
    frames, mask = torch.randn(4, 6, 32), torch.arange(6) < torch.tensor([[6], [3], [1], [0]])
    output = encoder(frames, mask)
    changed = torch.where(mask.unsqueeze(-1), frames, torch.randn(4, 6, 32))
    torch.testing.assert_close(encoder(changed, mask)[mask], output[mask])
    for length in (6, 3):  # alone, and without its padding
        torch.testing.assert_close(encoder(frames[1:2, :length], mask[1:2, :length])[0, :3], output[1, :3])
    output.sum().backward()
    assert output.isfinite().all()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


def test_lstm_leaves_padded_frames_alone_and_refuses_gaps():
    encoder = TemporalLSTM(16)
    frames = torch.randn(1, 4, 16)
    output = encoder(frames, torch.tensor([[1, 1, 0, 0]]))
    assert torch.equal(output[0, 2:], frames[0, 2:])
    assert not torch.allclose(output[0, :2], frames[0, :2])
    with pytest.raises(ValueError, match="first frames"):
        encoder(frames, torch.tensor([[1, 0, 1, 0]]))


def test_positions_matter_and_are_limited():
    torch.manual_seed(0)
    encoder = TemporalTransformer(32, layers=1, heads=2, frames=4)
    frames, mask = torch.randn(1, 4, 32), torch.ones(1, 4)
    assert not torch.allclose(encoder(frames.flip(1), mask).flip(1), encoder(frames, mask), atol=1e-4)
    with torch.no_grad():
        encoder.frame_position_embeddings.weight.zero_()
    torch.testing.assert_close(encoder(frames.flip(1), mask).flip(1), encoder(frames, mask))
    with pytest.raises(ValueError, match="5 frames, but position embeddings for 4"):
        encoder(torch.randn(1, 5, 32), torch.ones(1, 5))


def test_initialization_from_a_text_transformer():
    text, encoder = TemporalTransformer(64, layers=2, frames=10), TemporalTransformer(64, layers=2, frames=12)
    before, positions = encoder.frame_position_embeddings.weight[10:].clone(), text.frame_position_embeddings.weight
    start = TemporalInitialization([block.state_dict() for block in text.resblocks], positions.detach(), heads=1)
    initialize(encoder.frame_position_embeddings, encoder.resblocks, start)
    assert torch.equal(encoder.frame_position_embeddings.weight, torch.cat([positions, before]))
    for mine, source in zip(encoder.resblocks.parameters(), text.resblocks.parameters(), strict=True):
        assert torch.equal(mine, source)
