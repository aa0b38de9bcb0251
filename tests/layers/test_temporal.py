import pytest
import torch

from tvr_lightning.layers.temporal import TemporalLSTM, TemporalTransformer


@pytest.mark.parametrize("encoder", [TemporalTransformer(32, layers=2, heads=4, frames=8), TemporalLSTM(32, layers=2)])
def test_padding_does_not_change_real_frames_and_videos_without_frames_are_finite(encoder):
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


def test_every_64_dimensions_are_a_head():
    plain, two = TemporalTransformer(128, layers=1, frames=3), TemporalTransformer(128, layers=1, heads=2, frames=3)
    two.load_state_dict(plain.state_dict())
    frames, mask = torch.randn(2, 3, 128), torch.ones(2, 3)
    assert torch.equal(plain(frames, mask), two(frames, mask))


def test_the_lstm_keeps_padded_frames_and_rejects_gaps():
    encoder, frames = TemporalLSTM(16), torch.randn(1, 4, 16)
    assert torch.equal(encoder(frames, torch.tensor([[1, 1, 0, 0]]))[0, 2:], frames[0, 2:])
    with pytest.raises(ValueError, match="first frames"):
        encoder(frames, torch.tensor([[1, 0, 1, 0]]))


def test_more_frames_than_positions_are_rejected():
    with pytest.raises(ValueError, match="5 frames, but position embeddings for 4"):
        TemporalTransformer(32, layers=1, heads=2, frames=4)(torch.randn(1, 5, 32), torch.ones(1, 5))
