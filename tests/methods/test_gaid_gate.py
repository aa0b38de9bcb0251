"""GAID's gate: parts of video and text add up to one linear layer of their concatenation."""

import pytest
import torch

from tvr_lightning.features import VideoFeatures
from tvr_lightning.methods.gaid.model import Gate
from tvr_lightning.methods.gaid.options import GatedFusion

M, F, D = 3, 4, 8


@pytest.fixture
def video():
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])
    return VideoFeatures(torch.randn(M, F, D), mask, audio=torch.randn(M, F, D), audio_mask=mask)


@pytest.mark.parametrize("level", ["frame", "token"])
def test_logits_are_a_linear_layer_of_video_audio_and_text(video, level):
    gate, text = Gate(D, GatedFusion(level=level)), torch.randn(M, D)
    made = gate.of_video(video) + gate.of_text(text).unsqueeze(1)
    together = torch.cat([video.frames, video.audio, text.unsqueeze(1).expand(-1, F, -1)], dim=-1)
    torch.testing.assert_close(made, gate.linear(together))
    assert made.shape == (M, F, D if level == "token" else 1)


def test_a_sample_has_one_gate_from_the_means_of_its_real_frames(video):
    gate, text = Gate(D, GatedFusion(level="sample")), torch.randn(M, D)
    made = gate.of_video(video) + gate.of_text(text).unsqueeze(1)
    means = [torch.cat([video.frames[2, :2].mean(0), video.audio[2, :2].mean(0), text[2]])]
    torch.testing.assert_close(made[2, 0], gate.linear(torch.stack(means))[0])
    assert made.shape == (M, 1, 1)


def test_without_text_the_gate_has_no_weights_for_it(video):
    gate = Gate(D, GatedFusion(level="frame", text="none"))
    assert gate.linear.in_features == 2 * D
    assert gate.of_video(video).shape == (M, F, 1)
    torch.testing.assert_close(gate(video, torch.randn(5, D)), gate.of_video(video).sigmoid())
