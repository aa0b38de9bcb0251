"""The method with state of docs/adding-a-method.md: its means, and the common tests."""

from pathlib import Path

import torch
from examples.centering import Centering

from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.testing import MethodTestSuite, random_pairs


class TestCentering(MethodTestSuite):
    """Tests that every method must pass."""

    recipe = Path(__file__).parent / "centering.yaml"


@torch.no_grad()
def test_the_means_move_towards_those_of_the_batch_and_change_the_scores():
    method = Centering(TinyClipEncoder(64), momentum=0.75).eval()
    pairs = method.pair_features(random_pairs(method, 6)).detach()
    before = method.score(pairs.text, pairs.video).similarity
    method.update_state(pairs)
    torch.testing.assert_close(method.means[0], 0.25 * pairs.text.sentence.mean(0))
    assert not torch.allclose(method.score(pairs.text, pairs.video).similarity, before, atol=1e-4)
