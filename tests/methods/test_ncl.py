"""NCL: its equations, its queues, NCL on any method, and real runs."""

from functools import partial

import pytest
import torch
from methods.parts import FRAMES, SMALL, WIDTH, WORDS, encoder, features, paired, run
from parity.case import load_case
from parity.check import check_case

from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.normalization import DualSoftmax, QueryBankNorm, SinkhornBias
from tvr_lightning.layers.sinkhorn import sinkhorn_biases, sinkhorn_log_weights
from tvr_lightning.methods import NCL, XCLIP, CLIP4Clip
from tvr_lightning.methods.contrast import EmptyQueueError
from tvr_lightning.methods.ncl.model import normalized_logits
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.checkpoints import CheckpointError
from tvr_lightning.training.losses import info_nce


def method(base=CLIP4Clip, evaluation=None, **options):
    torch.manual_seed(0)
    return base(encoder(), evaluation=evaluation, words=WORDS, frames=FRAMES, contrast=NCL(**options))


def pairs(count=6, seed=0):
    text, video = features(count, count, seed=seed)
    video.frames = video.frames + text.sentence[:, None]
    return paired(text, video)


def encoded(model, data):
    return paired(model.encode_text(data.text), model.encode_video(data.video))


@pytest.mark.parametrize("name", ["ncl", "ncl_gamma_0.01", "ncl_multi_caption"])
def test_four_iterations_match_the_equations(parity_cases, name):
    case = load_case(parity_cases / f"{name}.safetensors")
    case.config["converged_iterations"] = 1
    case.expected = {n: t for n, t in case.expected.items() if ".converged." not in n and not n.startswith("converged")}
    comparisons = check_case(case)
    assert len(comparisons) > 20
    assert comparisons[0].relative < 1e-9, comparisons[0]


@pytest.mark.parametrize("name", ["ncl", "ncl_gamma_0.01"])
def test_float32_biases_equal_the_equations(parity_cases, name):
    case = load_case(parity_cases / f"{name}.safetensors")
    biases = sinkhorn_biases(case.expected["cosine"].float(), case.config["gamma"])
    for side, bias in zip(("text", "video"), biases, strict=True):
        assert bias.dtype == torch.float32
        expected = case.expected[f"iterations_4.{side}_bias"]
        torch.testing.assert_close(bias.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradient_through_the_iterations_equals_finite_differences():
    similarity = torch.rand(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    gamma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, g: sinkhorn_biases(s, g, 3), (similarity, gamma))


def test_a_matrix_meets_the_marginals_of_rows_and_columns_at_convergence():
    logits = 10 * torch.rand(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows, columns = torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0, 4.0]).double(), torch.tensor([5.0, 1.0, 1.0, 1.0]).double()
    alpha, beta = sinkhorn_log_weights(
        lambda weights: (logits + weights).logsumexp(1),
        lambda weights: (logits if weights is None else logits + weights[:, None]).logsumexp(0),
        500,
        rows.log(),
        columns.log(),
    )
    matrix = (logits + alpha[:, None] + beta).flatten().softmax(0).view(6, 4)
    torch.testing.assert_close(matrix.sum(1), rows / rows.sum())
    torch.testing.assert_close(matrix.sum(0), columns / columns.sum())


def test_gradients_are_finite_at_the_temperature_of_clip():
    cosine = torch.full((16, 16), 0.99) - 0.01 * torch.rand(16, 16)
    logits = (cosine / 0.01).requires_grad_()
    for detach in (True, False):
        loss = info_nce(normalized_logits(logits, detach=detach))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.isfinite(loss)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("detach", [True, False])
def test_the_loss_uses_adjusted_scores_and_may_detach_their_biases(detach):
    model = method(iterations=7, detach_biases=detach)
    data = encoded(model, pairs())
    data.text.sentence.requires_grad_()

    def with_gradient(loss):
        return loss, torch.autograd.grad(loss, data.text.sentence)[0]

    def expected(iterations=7, detach=detach):
        logits = model.score(data.text, data.video).similarity / model.score_temperature()
        return with_gradient(info_nce(normalized_logits(logits, iterations, detach=detach)))

    loss, gradient = with_gradient(model.losses(data)["info_nce"])
    torch.testing.assert_close((loss, gradient), expected())
    assert not torch.allclose(loss, expected(iterations=1)[0])
    assert not torch.allclose(gradient, expected(detach=not detach)[1], rtol=1e-4)


def test_any_method_can_have_the_contrast():
    model = method(XCLIP)
    assert model.title == "NCL on XCLIP"
    assert "contrast" not in model.hparams
    queues = ("text_queue.position", "text_queue.filled", "video_queue.position", "video_queue.filled")
    assert {n for n in model.state_dict() if n.startswith("contrast.")} == {f"contrast.{name}" for name in queues}
    assert model.reads_pairs
    assert not method(queue_size=0).reads_pairs
    with pytest.raises(EmptyQueueError, match="Train first"):
        model.bank()


def test_queues_contain_the_last_pairs_of_all_steps():
    model, seen = method(queue_size=10), torch.empty(0, WIDTH)
    for seed, count in enumerate((4, 4, 4, 4, 12, 1)):  # the fifth step exceeds the queue
        step = encoded(model, pairs(count, seed))
        step.text.sentence.requires_grad_()
        model.update_state(step)
        seen = torch.cat([seen, step.text.sentence.detach()])
        sentences = seen[-10:]
        torch.testing.assert_close(model.bank().texts.sentence, sentences)
    bank = model.bank()
    assert not bank.texts.sentence.requires_grad
    assert bank.texts.words.shape == (10, 0, WIDTH)
    assert bank.videos.frames.shape == (10, 1, WIDTH)
    assert bank.videos.frame_mask.dtype == torch.bool
    fresh = method(queue_size=10)
    fresh.on_load_checkpoint({"state_dict": model.state_dict()})
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.bank().texts.sentence, sentences)
    with pytest.raises(
        CheckpointError, match=r"contrast.text_queue.stored_sentence has shape \(10, 64\), expected \(3, 64\)"
    ):
        method(queue_size=3).on_load_checkpoint({"state_dict": model.state_dict()})


class WithoutContrast(CLIP4Clip):
    """A method whose loss is not contrastive."""

    def losses(self, pairs):
        return {"distance": self.score(pairs.text, pairs.video).similarity.square().mean()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "at least 1"),
        ({"normalize_loss": False, "iterations": 4}, "Remove iterations and detach_biases"),
        ({"normalize_loss": False, "detach_biases": False}, "Remove iterations and detach_biases"),
        ({"queue_size": 0, "evaluation": EvaluationConfig(normalization=SinkhornBias())}, "Set queue_size above 0"),
    ],
)
def test_bad_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        method(**options)


def test_a_loss_without_logits_is_rejected():
    model = method(WithoutContrast)
    with pytest.raises(ValueError, match=r"WithoutContrast\.losses passes no logits through contrastive_logits"):
        model.contrast.terms(model.losses, encoded(model, pairs()))
    other = method(WithoutContrast, normalize_loss=False)
    assert set(other.contrast.terms(other.losses, encoded(other, pairs()))) == {"distance"}


# Real runs


def test_a_run_saves_its_queues_and_reports_its_normalization(tiny_root, tmp_path):
    folder, results = run("fit", ["ncl", "fixture"], tiny_root, tmp_path, *SMALL)
    assert folder == tmp_path / "ncl-on-clip4clip-msrvtt" / "version_0"
    assert results["post_processing"].startswith("Sinkhorn (train queries")
    assert results["transductive"] is False
    assert results["balance"]["text-to-video"]["normalization_error"] > 0
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert state["contrast.text_queue.stored_sentence"].shape == (16384, 64)
    assert int(state["contrast.text_queue.filled"]) == 16


@pytest.fixture
def built(recipe):
    """A method and its data by the name of a recipe."""
    options = (*SMALL[3:], "--trainer.logger=false", "--data.init_args.batch_size=4")
    return partial(recipe, options=(*options, "--model.init_args.clip4clip.similarity_header=MeanP"))


@pytest.mark.parametrize(("name", "waiting"), [("ncl", [4, 8, 0, 0]), ("clip4clip", [0] * 4)])
def test_only_queues_keep_the_pairs_of_accumulated_batches(built, name, waiting):
    model, data = built(name)
    counts = []
    model.on_train_batch_end = lambda *batch: counts.append(sum(len(pairs.text) for pairs in model._pairs))
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0, accumulate_grad_batches=3)
    trainer.fit(model, datamodule=data)
    assert trainer.global_step == 2  # three batches, and the last one alone
    assert counts == waiting
    if name == "ncl":
        assert len(model.contrast.text_queue) == len(model.contrast.video_queue) == 16


def test_any_method_can_be_normalized_with_the_training_split(built):
    model, data = built("clip4clip")
    tester = quiet_trainer()
    found = {}
    for normalizer in (None, QueryBankNorm(5.0), SinkhornBias(), SinkhornBias(queries="oracle"), DualSoftmax()):
        model.evaluation_config = EvaluationConfig(normalization=normalizer, bank_size=10, top_k=2, balance=True)
        tester.test(model, datamodule=data, verbose=False)
        found[normalizer.name if normalizer else None] = model.evaluation
    assert [(e.post_processing, e.transductive) for e in found.values()] == [
        (None, False),
        ("QB-Norm (beta 5, k 1)", False),
        ("Sinkhorn (train queries, the method's gamma, 4 iterations, uniform marginals)", False),
        ("Sinkhorn (oracle queries, the method's gamma, 4 iterations, uniform marginals)", True),
        ("dual softmax (temperature 100)", True),
    ]
    errors = [each.balance["text-to-video"].error for each in found.values()]
    assert errors[3] < min(errors[0], errors[2])
    bank = model.bank()
    assert (len(bank.texts), len(bank.videos)) == (10, 10)
    assert bank.texts.words.shape[1] == 0
    split = data.read_split("train")
    assert len(split.texts) > 10
    every = model.encoder.encode_text([text.text for text in split.texts], model.words).sentence
    distances = (bank.texts.sentence[:, None] - every).norm(dim=-1).amin(1)
    assert bool((distances < 1e-4).all())
    tester.predict(model, datamodule=data)
    texts, scores, videos = model.predictions
    assert scores.shape == videos.shape == (len(texts), 2)
    assert bool((scores[:, 0] >= scores[:, 1]).all())
    assert bool((scores <= 1).all())  # dual softmax weighs cosines by probabilities


@pytest.mark.slow
def test_the_recipe_learns_the_synthetic_dataset_and_lowers_the_normalization_error(fixture_root, learned, tmp_path):
    folder, results = run("fit", ["ncl", "fixture"], fixture_root, tmp_path, *learned)
    checkpoint = f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"
    plain = "--model.init_args.evaluation.normalization=null"
    _, unnormalized = run("test", ["ncl", "fixture"], fixture_root, tmp_path, plain, checkpoint)
    ours, theirs = (
        sum(balance["normalization_error"] for balance in found["balance"].values())
        for found in (results, unnormalized)
    )
    assert results["text_to_video"]["R@1"] >= 15 * 100 / results["videos"]
    assert ours < theirs
