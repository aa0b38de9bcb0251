"""NCL: its equations, any base method under it, queues that fill, save and resume, and real runs."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from metric_rows import normalization_error
from parity.case import load_case
from parity.check import check_case

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.normalization import DualSoftmax, QueryBankNorm, SinkhornBias
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.methods import DRL, GAID, GARE, NCL, TCMGC, TMASS, XCLIP, CLIP4Clip, XPool
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import CLIP4ClipOptions, TightTransf
from tvr_lightning.methods.contrast import EmptyQueueError
from tvr_lightning.methods.drl import DRLOptions
from tvr_lightning.methods.gaid.options import GAIDOptions, NoFusion
from tvr_lightning.methods.ncl.model import normalized_logits
from tvr_lightning.methods.tcmgc.options import TCMGCOptions
from tvr_lightning.methods.xclip import XCLIPOptions
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.checkpoints import CheckpointError
from tvr_lightning.training.losses import info_nce

RECIPES = Path(__file__).parents[2] / "recipes"
W, F, D = 8, 4, 64
BASES = {
    "CLIP4Clip meanP": CLIP4Clip,
    "CLIP4Clip tightTransf": partial(CLIP4Clip, clip4clip=CLIP4ClipOptions(TightTransf(1))),
    "DRL": partial(DRL, drl=DRLOptions(temporal_encoder=SeqTransf(1))),
    "GAID": partial(GAID, gaid=GAIDOptions(fusion=NoFusion())),
    "GARE": GARE,
    "TCMGC": partial(TCMGC, tcmgc=TCMGCOptions(temporal_layers=1, keep_rate=0.5)),
    "TMASS": TMASS,
    "XCLIP": partial(XCLIP, xclip=XCLIPOptions(SeqTransf(1))),
    "XPool": XPool,
}


def method(base=CLIP4Clip, evaluation=None, **options) -> RetrievalModule:
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=D, image_size=16, patch_size=8, text_layers=4, vision_layers=1)
    return base(encoder, evaluation=evaluation, words=W, frames=F, contrast=NCL(**options))


def pairs(count=6, seed=0, dtype=torch.float32) -> PairedFeatures:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(count, W, D, generator=generator, dtype=dtype)
    frames = torch.randn(count, F, D, generator=generator, dtype=dtype) + words[:, :1]
    text = TextFeatures(words[:, 0], words, torch.ones(count, W, dtype=torch.bool))
    mask = torch.arange(F) < torch.arange(count)[:, None] % F + 1
    return PairedFeatures(text, VideoFeatures(frames, mask), torch.arange(count), torch.arange(count))


def encoded(model: RetrievalModule, data: PairedFeatures) -> PairedFeatures:
    text, video = model.encode_text(data.text), model.encode_video(data.video)
    return PairedFeatures(text, video, data.text_index, data.video_index)


@pytest.mark.parametrize("name", ["ncl", "ncl_gamma_0.01", "ncl_multi_caption"])
def test_four_iterations_are_the_equations_written_out(parity_cases, name):
    case = load_case(parity_cases / f"{name}.safetensors")
    case.config["converged_iterations"] = 1
    case.expected = {n: t for n, t in case.expected.items() if ".converged." not in n and not n.startswith("converged")}
    comparisons = check_case(case)
    assert len(comparisons) > 20
    assert comparisons[0].relative < 1e-9, comparisons[0]


@pytest.mark.parametrize("gamma", [1.0, 0.07])
def test_the_gradient_of_a_video_bias_is_equation_28_over_gamma(gamma):
    count = 7
    cosine = torch.rand(count, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bias = (0.1 * torch.randn(count, dtype=torch.float64)).requires_grad_()
    adjusted = cosine + bias
    info_nce(adjusted / gamma).backward()
    mass = (adjusted.detach() / gamma).softmax(1).sum(0)
    printed = -(1 - mass) / (2 * count)
    torch.testing.assert_close(bias.grad, printed / gamma)
    assert torch.allclose(bias.grad, printed) is (gamma == 1.0)


def test_balanced_logits_are_retrieved_evenly_and_four_iterations_leave_a_residual():
    generator = torch.Generator().manual_seed(0)
    cosine = torch.rand(40, 40, generator=generator, dtype=torch.float64) * 0.6
    gamma = 0.07
    exact, four = (normalized_logits(cosine / gamma, iterations) * gamma for iterations in (2000, 4))
    for balanced in (exact, exact.T):
        assert normalization_error(balanced, gamma) < 1e-5
    before = normalization_error(cosine, gamma)
    assert 1e-5 < normalization_error(four, gamma) < before / 5


def test_nothing_overflows_at_clips_temperature():
    cosine = torch.full((16, 16), 0.99) - 0.01 * torch.rand(16, 16)
    logits = (cosine / 0.01).requires_grad_()
    for detach in (True, False):
        loss = info_nce(normalized_logits(logits, detach=detach))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.isfinite(loss)
        assert bool(gradient.isfinite().all())


def test_constants_of_the_cosine_scale_reach_the_temperatures_gradient():
    cosine = torch.rand(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for scaled in (True, False):
        scale = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
        logits = scale * cosine
        normalized = normalized_logits(logits, scale=scale if scaled else 1.0)
        (gradient,) = torch.autograd.grad(info_nce(normalized), scale)
        biases = (normalized - logits).detach() / 20.0
        again = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
        expected = info_nce(again * (cosine + biases) if scaled else again * cosine + 20.0 * biases)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, again)[0])


@pytest.mark.parametrize("name", list(BASES))
def test_any_methods_loss_sees_biases_and_its_scores_do_not(name):
    model = method(BASES[name], queue_size=8).eval()
    plain = method(BASES[name], normalize_loss=False, queue_size=8).eval()
    for made in (model, plain):
        if name == "CLIP4Clip tightTransf":  # an untrained cross encoder scores all pairs alike
            made.cross.similarity_dense.weight.data *= 100
    data = encoded(model, pairs())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        losses = model.losses(data)
        torch.manual_seed(1)
        unbiased = plain.losses(data)
    assert set(losses) == set(unbiased)
    changed = {term for term in losses if not torch.allclose(losses[term], unbiased[term], rtol=1e-4)}
    assert changed <= {"info_nce", "perturbation", "support", "stochastic"}
    assert changed
    sum(losses.values()).backward()
    torch.testing.assert_close(
        model.score(data.text, data.video).similarity, plain.score(data.text, data.video).similarity
    )
    model.update_state(data.detach())
    bank = model.bank()
    torch.testing.assert_close(
        model.score(bank.texts, bank.videos).similarity, model.score(data.text, data.video).similarity
    )


def test_the_loss_is_that_of_adjusted_scores():
    model = method(iterations=7)
    data = encoded(model, pairs())
    gamma = model.score_temperature()
    similarity = model.score(data.text, data.video).similarity
    expected = info_nce(normalized_logits(similarity / gamma, 7))
    torch.testing.assert_close(model.losses(data)["info_nce"], expected)
    assert not torch.allclose(method(iterations=1).losses(data)["info_nce"], expected)


@pytest.mark.parametrize("detach", [True, False])
def test_biases_are_constants_unless_wanted_otherwise(detach):
    model = method(detach_biases=detach)
    data = encoded(model, pairs())
    data.text.sentence.requires_grad_()
    (gradient,) = torch.autograd.grad(model.losses(data)["info_nce"], data.text.sentence)
    logits = model.temperature() * model.score(data.text, data.video).similarity
    expected = torch.autograd.grad(info_nce(normalized_logits(logits, detach=detach)), data.text.sentence)[0]
    other = torch.autograd.grad(
        info_nce(
            normalized_logits(model.temperature() * model.score(data.text, data.video).similarity, detach=not detach)
        ),
        data.text.sentence,
    )[0]
    torch.testing.assert_close(gradient, expected)
    assert not torch.allclose(gradient, other, rtol=1e-4)


def test_any_method_is_given_it_and_says_so():
    model = method(BASES["XCLIP"])
    assert model.title == "NCL on XCLIP"
    assert "contrast" not in model.hparams
    queues = ("text_queue.position", "text_queue.filled", "video_queue.position", "video_queue.filled")
    assert {n for n in model.state_dict() if n.startswith("contrast.")} == {f"contrast.{name}" for name in queues}


def test_checkpoints_name_the_normalisation_in_plain_words(tmp_path):
    model = method(evaluation=EvaluationConfig(normalization=SinkhornBias()))
    torch.save(dict(model.hparams), tmp_path / "hparams.pt")
    loaded = torch.load(tmp_path / "hparams.pt", weights_only=True)
    assert loaded["evaluation"]["normalization"]["class_path"] == "tvr_lightning.evaluation.normalization.SinkhornBias"
    assert SinkhornBias(**loaded["evaluation"]["normalization"]["init_args"]).name.startswith("Sinkhorn (train queries")


def test_queues_hold_the_last_pairs_of_all_steps():
    model = method(queue_size=10)
    seen = [encoded(model, pairs(4, seed)).detach() for seed in range(4)]
    for step in seen:
        model.update_state(step)
    bank = model.bank()
    sentences = torch.cat([step.text.sentence for step in seen])[-10:]
    torch.testing.assert_close(bank.texts.sentence, sentences)
    assert bank.texts.words.shape == (10, 0, D)
    assert bank.videos.frames.shape == (10, 1, D)
    fresh = method(queue_size=10)
    fresh.on_load_checkpoint({"state_dict": model.state_dict()})
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.bank().texts.sentence, sentences)
    with pytest.raises(
        CheckpointError, match=r"contrast.text_queue.stored_sentence has shape \(10, 64\), expected \(3, 64\)"
    ):
        method(queue_size=3).on_load_checkpoint({"state_dict": model.state_dict()})


def test_an_untrained_queue_says_so():
    with pytest.raises(EmptyQueueError, match="Train first"):
        method().bank()


def test_ten_steps_reduce_the_loss():
    model = method(BASES["XCLIP"], queue_size=16)
    parameters = [p for n, p in model.named_parameters() if not n.startswith("encoder.")]
    optimizer = torch.optim.Adam(parameters, 3e-3)
    losses = []
    for _ in range(10):
        data = encoded(model, pairs())
        loss = sum(model.losses(data).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_state(data.detach())
        losses.append(loss.item())
    assert math.isfinite(losses[-1])
    assert losses[-1] < 0.8 * losses[0]
    assert len(model.contrast.text_queue) == 16


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
        ({"queue_size": -1}, "at least 0"),
        ({"bank": "memory"}, "one of queue, training-split"),
        ({"queue_size": 0, "evaluation": EvaluationConfig(normalization=SinkhornBias())}, "Set queue_size above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        method(**options)


def test_a_loss_without_logits_is_refused():
    model = method(WithoutContrast)
    with pytest.raises(ValueError, match=r"WithoutContrast\.losses passes no logits through contrastive_logits"):
        model.contrast.terms(model.losses, encoded(model, pairs()))
    other = method(WithoutContrast, normalize_loss=False)
    assert set(other.contrast.terms(other.losses, encoded(other, pairs()))) == {"distance"}


# Real runs


@pytest.fixture(scope="module")
def fixture_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("fixture")
    synthesize("msrvtt", root, 20, 0, workers=1, progress=False)
    return root


def overlay(root: Path, *more: str) -> list[str]:
    return [
        f"--data.init_args.root={root}", "--data.init_args.batch_size=8", "--data.init_args.num_workers=0",
        "--model.init_args.encoder.init_args.width=64", "--data.init_args.frames=4", *more,
    ]  # fmt: skip


def test_a_recipe_trains_saves_its_queues_and_says_how_it_normalised(fixture_root, tmp_path):
    options = [
        *overlay(fixture_root), f"--results.directory={tmp_path}", "--trainer.max_epochs=2",
        "--trainer.check_val_every_n_epoch=1", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1",
    ]  # fmt: skip
    recipes = [f"--config={RECIPES / name}.yaml" for name in ("ncl", "fixture")]
    assert main(["fit", *recipes, *options]) == 0
    (path,) = tmp_path.glob("ncl-on-clip4clip-msrvtt/version_0/results.json")
    results = json.loads(path.read_text())
    assert results["post_processing"].startswith("Sinkhorn (train queries")
    assert results["transductive"] is False
    assert results["balance"]["text-to-video"]["normalization_error"] > 0
    checkpoint = torch.load(path.parent / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["contrast.text_queue.stored_sentence"].shape == (16384, 64)
    assert int(checkpoint["state_dict"]["contrast.text_queue.filled"]) == 2 * 16
    oracle = f"--config={RECIPES / 'variants/ncl-oracle.yaml'}"
    ckpt = f"--ckpt_path={path.parent / 'checkpoints' / 'last.ckpt'}"
    assert main(["test", recipes[0], oracle, recipes[1], *options, ckpt]) == 0
    (again,) = (json.loads(p.read_text()) for p in tmp_path.glob("ncl-on-clip4clip-msrvtt/version_1/results.json"))
    assert again["transductive"] is True
    assert again["post_processing"].startswith("Sinkhorn (oracle queries")
    assert (
        again["balance"]["text-to-video"]["normalization_error"]
        < results["balance"]["text-to-video"]["normalization_error"]
    )


def build(root: Path, recipe: str, *more: str):
    names = [RECIPES / f"{recipe}.yaml", RECIPES / "fixture.yaml"]
    return from_recipe(names, overlay(root, "--trainer.logger=false", *more))


def trainer(**options) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(accelerator="cpu", num_sanity_val_steps=0, use_distributed_sampler=False, **quiet, **options)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resuming_is_exact_queues_included(fixture_root, tmp_path):
    queue = "--model.init_args.contrast.init_args.queue_size=20"
    whole, data = build(fixture_root, "ncl", queue)
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(max_epochs=2, limit_val_batches=0, callbacks=[keep]).fit(whole, datamodule=data)
    resumed, data = build(fixture_root, "ncl", queue)
    trainer(max_epochs=2, limit_val_batches=0, enable_checkpointing=False).fit(
        resumed, datamodule=data, ckpt_path=str(tmp_path / "epoch=0.ckpt"), weights_only=True
    )
    first, second = whole.state_dict(), resumed.state_dict()
    assert list(first) == list(second)
    assert int(first["contrast.text_queue.filled"]) == 20
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


class Waiting(Callback):
    """Counts the pairs that wait for `update_state` after every batch."""

    def __init__(self) -> None:
        self.counts = []

    def on_train_batch_end(self, trainer, pl_module, *arguments) -> None:
        self.counts.append(sum(len(pairs.text) for pairs in pl_module._pairs))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.parametrize(("recipe", "waiting"), [("ncl", [4, 8, 0, 0]), ("clip4clip", [0] * 4)])
def test_queues_get_the_pairs_of_all_accumulated_batches_and_nobody_else_keeps_them(fixture_root, recipe, waiting):
    model, data = build(fixture_root, recipe, "--data.init_args.batch_size=4")
    seen = Waiting()
    run = trainer(
        max_epochs=1, limit_val_batches=0, enable_checkpointing=False, accumulate_grad_batches=3, callbacks=[seen]
    )
    run.fit(model, datamodule=data)
    assert run.global_step == 2  # three batches, and the last one alone
    assert seen.counts == waiting
    if recipe == "ncl":
        assert len(model.contrast.text_queue) == len(model.contrast.video_queue) == 16


def test_without_queues_no_pairs_are_kept():
    assert method().reads_pairs
    assert not method(queue_size=0).reads_pairs


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*some scores are below zero")
def test_any_method_is_normalised_with_the_training_split(fixture_root):
    model, data = build(fixture_root, "clip4clip", "--model.init_args.clip4clip.similarity_header=MeanP")
    run = trainer()
    found = {}
    for normalizer in (None, QueryBankNorm(5.0), SinkhornBias(), DualSoftmax()):
        model.evaluation_config = EvaluationConfig(normalization=normalizer, bank_size=10, top_k=2)
        run.test(model, datamodule=data, verbose=False)
        found[normalizer.name if normalizer else None] = model.evaluation
    assert [(e.post_processing, e.transductive) for e in found.values()] == [
        (None, False),
        ("QB-Norm (beta 5, k 1)", False),
        ("Sinkhorn (train queries, the method's gamma, 4 iterations, uniform marginals)", False),
        ("dual softmax (temperature 100)", True),
    ]
    bank = model.bank()
    assert (len(bank.texts), len(bank.videos)) == (10, 10)
    assert bank.texts.words.shape[1] == 0
    split = data.read_split("train")
    assert len(split.texts) > 10
    every = model.encoder.encode_text([text.text for text in split.texts], model.words).sentence
    distances = (bank.texts.sentence[:, None] - every).norm(dim=-1).amin(1)
    assert bool((distances < 1e-4).all())
    run.predict(model, datamodule=data)
    texts, scores, videos = model.predictions
    assert scores.shape == videos.shape == (len(texts), 2)
    assert bool((scores[:, 0] >= scores[:, 1]).all())
    assert bool((scores <= 1).all())  # dual softmax weighs cosines by probabilities


@pytest.mark.slow
def test_the_recipe_learns_the_fixture_and_lowers_the_normalisation_error(tmp_path):
    synthesize("msrvtt", tmp_path / "fixture", 500, 0, workers=2, progress=False)
    options = [f"--data.init_args.root={tmp_path / 'fixture'}", f"--results.directory={tmp_path / 'runs'}"]
    options.append("--trainer.accelerator=cpu")
    recipes = [f"--config={RECIPES / name}.yaml" for name in ("ncl", "fixture")]
    assert main(["fit", *recipes, *options]) == 0
    folder = tmp_path / "runs" / "ncl-on-clip4clip-msrvtt" / "version_0"
    checkpoint = f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"
    plain = tmp_path / "plain.yaml"
    plain.write_text("model: {init_args: {evaluation: {normalization: null}}}")
    assert main(["test", *recipes, f"--config={plain}", *options, checkpoint]) == 0
    results, unnormalized = (
        json.loads((folder.with_name(name) / "results.json").read_text()) for name in ("version_0", "version_1")
    )
    errors = [
        sum(balance["normalization_error"] for balance in found["balance"].values())
        for found in (results, unnormalized)
    ]
    print(results["text_to_video"], unnormalized["text_to_video"], errors)
    assert results["text_to_video"]["R@1"] >= 15 * 100 / results["videos"]
    assert errors[0] < errors[1]
