"""The cross encoder of CLIP4Clip's tight header."""

import pytest
import torch

from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.clip4clip import CrossEncoder, cross_encoder


@pytest.fixture
def items():
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    sentence = torch.randn(5, 64, generator=generator)
    text = TextFeatures(sentence, sentence[:, None], torch.ones(5, 1, dtype=torch.bool))
    return text, VideoFeatures(torch.randn(3, 4, 64, generator=generator), mask)


def spread(cross):
    """Weights at which logits differ clearly between pairs."""
    torch.manual_seed(1)
    for parameter in cross.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return cross


def test_blocks_give_the_scores_and_gradients_of_the_whole(items):
    text, video = items
    whole = spread(CrossEncoder(64, layers=2, heads=2, positions=9, dropout=0.0))
    for pairs in (1, 2, 3, 7):
        blocked = CrossEncoder(64, layers=2, heads=2, positions=9, dropout=0.0)
        blocked = blocked.within(2 * 4 * pairs * blocked.pair_numbers(text, video) / 2**30)
        blocked.load_state_dict(whole.state_dict())
        gradients = []
        for cross in (whole, blocked):
            sentence = text.sentence.clone().requires_grad_()
            scores = cross(TextFeatures(sentence, text.words, text.word_mask), video).similarity
            scores.square().sum().backward()
            gradients.append((scores.detach(), sentence.grad, cross.resblocks[0].attn.in_proj_weight.grad.clone()))
            cross.zero_grad()
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_score_belongs_to_its_pair_alone(items):
    cross = spread(CrossEncoder(64, layers=1, positions=9)).eval()
    text, video = items
    scores = cross(text, video).similarity
    assert scores.std() > 1e-3
    texts, videos = torch.tensor([3, 1]), torch.tensor([2, 0])
    torch.testing.assert_close(cross(text[texts], video[videos]).similarity, scores[texts][:, videos])
    noise = torch.where(video.frame_mask.unsqueeze(-1), video.frames, torch.randn(3, 4, 64))
    torch.testing.assert_close(cross(text, VideoFeatures(noise, video.frame_mask)).similarity, scores)


def test_dropout_acts_in_training_only(items):
    cross = spread(CrossEncoder(64, layers=1, positions=9, dropout=0.5))
    assert not torch.allclose(cross(*items).similarity, cross(*items).similarity)
    cross.eval()
    assert torch.equal(cross(*items).similarity, cross(*items).similarity)
    off = CrossEncoder(64, layers=1, positions=9, dropout=0.0)
    assert torch.equal(off(*items).similarity, off(*items).similarity)


def test_it_starts_from_the_text_transformer():
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=3, vision_layers=1, context_length=10)
    cross = cross_encoder(encoder, layers=2, frames=12)
    assert cross.position_embeddings.num_embeddings == 13
    assert torch.equal(cross.position_embeddings.weight[:10], encoder.clip.positional_embedding)
    for mine, theirs in zip(cross.resblocks, encoder.clip.transformer.resblocks, strict=False):
        assert torch.equal(mine.attn.in_proj_weight, theirs.attn.in_proj_weight)
        assert torch.equal(mine.mlp.c_proj.bias, theirs.mlp.c_proj.bias)


def test_more_frames_than_positions_are_refused(items):
    with pytest.raises(ValueError, match="4 frames need 5 position embeddings, but there are 4"):
        CrossEncoder(64, layers=1, positions=4)(*items)
