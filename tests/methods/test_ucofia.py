"""UCoFiA's evaluation as released."""

import torch
from methods.parts import build, features

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.evaluator import Evaluator
from tvr_lightning.evaluation.normalization import Bank
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.layers.sinkhorn import sinkhorn_biases
from tvr_lightning.methods import UCoFiA

B, P = 5, 9


def module(**options):
    return build(UCoFiA, {"temporal_layers": 1, **options}, torch.float32)


def test_evaluation_as_released_drops_a_matrix_draws_noise_and_does_not_change_training():
    options = {"patch_selection": PatchSelection(samples=10, sigma=1.0)}
    trained, released = module(**options), module(evaluate_as="released", **options)
    released.load_state_dict(trained.state_dict())
    text, video = features(B, B, patches=P)
    torch.manual_seed(0)
    seen = trained.encode_video(video)
    assert torch.equal(trained.score(text, seen).similarity, released.score(text, seen).similarity)
    trained.eval(), released.eval()
    parts, without_l1 = trained.score(text, seen).parts, released.score(text, seen).parts
    changed = [name for name in parts if not torch.equal(parts[name], without_l1[name])]
    assert changed == ["word_patch"]
    trained.head.patch_matrix = None
    assert torch.equal(trained.score(text, seen).similarity, released.score(text, seen).similarity)
    assert not torch.equal(released.encode_video(video).patches, released.encode_video(video).patches)


def test_evaluation_as_released_adds_the_mean_bias_of_the_alignments():
    made = module(evaluate_as="released").eval()
    text, video = features(B, B, patches=P)
    queries, bank_video = features(9, 9, patches=P, seed=3)
    seen, bank = made.encode_video(video), Bank(queries, made.encode_video(bank_video))
    truth = GroundTruth(torch.arange(B), B, "synthetic", "test", "pairs")
    scale = made.temperature().detach()

    def ranks(normalizer):
        evaluator = Evaluator(made.score, temperature=made.score_temperature(), parts=made.averaged_parts)
        found = evaluator.evaluate(text, torch.arange(B), seen, torch.arange(B), truth, normalizer, bank)
        return found.text_to_video_ranks, found.video_to_text_ranks

    with torch.no_grad():
        scores = made.score(text, seen).similarity
        biases = []
        for few, many, axis in ((queries, seen, 1), (text, bank.videos, 0)):
            parts = made.score(few, many).parts.values()
            queue = [scale * (part if axis == 1 else part.T) for part in parts]
            biases.append(torch.stack([sinkhorn_biases(part, 1.0, iterations=4)[1] for part in queue]).mean(0))
    forward, backward = scale * scores + biases[0], (scale * scores + biases[1][:, None]).T
    found = ranks(made.evaluation_config.normalization)
    for direction, expected in zip(found, (forward, backward), strict=True):
        better = (expected > expected.diagonal()[:, None]).sum(1)
        assert direction.better.tolist() == better.tolist()
    assert not torch.equal(scores.argsort(1), forward.argsort(1))
