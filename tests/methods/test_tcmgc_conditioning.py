"""TC-MGC selects the frames that a text describes, and on the synthetic dataset it keeps up with mean pooling."""

import torch
from methods.parts import descend, features

from tvr_lightning.methods.tcmgc.model import TCMGCHead
from tvr_lightning.methods.tcmgc.options import LanguageVideoAttention, TCMGCOptions
from tvr_lightning.training.losses import info_nce

WORDS, FRAMES, WIDTH, SCALE = 10, 3, 32, torch.tensor(20.0)


def scenes(seed, videos=48):
    """Texts that each describe one frame of a video, and videos of unrelated frames."""
    text, video = features(videos, videos, words=WORDS, frames=FRAMES, width=WIDTH, seed=seed)
    described = video.frames[torch.arange(videos), torch.arange(videos) % FRAMES]
    text.sentence, text.words = described + text.sentence, described[:, None] + text.words
    video.frame_mask[:] = True
    return text, video


def recall(similarity):
    return (similarity.argmax(1) == torch.arange(len(similarity))).float().mean().item()


def test_attention_selects_the_described_frames_of_videos_not_seen_in_training(monkeypatch):
    torch.manual_seed(0)
    options = TCMGCOptions(attention=LanguageVideoAttention(dropout=0.0), keep_rate=0.4, temporal_layers=0)
    head, pairs = TCMGCHead(WIDTH, WORDS, FRAMES, options), scenes(seed=0)
    descend(lambda: info_nce(SCALE * head(*pairs, SCALE).similarity), dict(head.named_parameters()))
    text, video = scenes(seed=1)
    pooled = recall(torch.cosine_similarity(text.sentence[:, None], video.frames.mean(1), dim=-1))
    conditioned = recall(head(text, video, SCALE).similarity)
    assert conditioned > pooled + 0.2
    weigh = head.attention._weights
    monkeypatch.setattr(head.attention, "_weights", lambda *given: weigh(*given).roll(1, dims=1))
    assert recall(head(text, video, SCALE).similarity) < pooled
