"""Question answering on the features of a retrieval method: the head, bad options, and runs."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch
from methods.parts import RECIPES, SMALL, descend, encoder, features, run

from tvr_lightning.cli import main
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.methods.clip4clip import CLIP4Clip
from tvr_lightning.methods.dpdv.method import DPDV
from tvr_lightning.methods.video_qa import AnswerHead, VideoQuestionAnswering, words_patches
from tvr_lightning.reproduce.report.figures.figure_types import draw, figures_of
from tvr_lightning.reproduce.report.sources import read_runs
from tvr_lightning.store import FeatureStore
from tvr_lightning.testing.contract import filled
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.checkpoints import CheckpointError
from tvr_lightning.training.optim import OptimizerConfig

B, W, F, P, D = 6, 5, 4, 3, 64


def inputs(seed=0):
    return features(B, B, words=W, frames=F, patches=P, seed=seed)


def head(**options):
    torch.manual_seed(0)
    return AnswerHead(D, 7, hidden=16, **options).eval()


def module(method=CLIP4Clip, **options):
    options = {"answers": 7, "hidden": 16, "dropout": 0.0} | options
    return VideoQuestionAnswering(encoder(), partial(method, words=W, frames=F), **options)


def test_the_question_selects_the_most_similar_half_of_the_frames():
    text, video = inputs()
    chosen = head().spotted(text.sentence, video)
    cosine = torch.cosine_similarity(video.frames, text.sentence[:, None], dim=-1)
    cosine = cosine.masked_fill(~video.frame_mask, -2)
    for row, mask in enumerate(video.frame_mask):
        best = cosine[row].topk((int(mask.sum()) + 1) // 2).indices
        assert chosen[row].nonzero().flatten().tolist() == sorted(best.tolist())


def test_each_word_selects_its_most_similar_patch():
    text, video = inputs()
    found = words_patches(text, video.patches, video.frame_mask)
    for row in range(B):
        patches, words = video.patches[row][video.frame_mask[row]].flatten(0, 1), text.words[row][text.word_mask[row]]
        cosine = torch.cosine_similarity(words[:, None], patches, dim=-1)
        torch.testing.assert_close(found[row], patches[cosine.argmax(1)].mean(0))


@pytest.mark.parametrize("options", [{}, {"pooling": "mean"}, {"micro": True}])
def test_answers_do_not_depend_on_padding_or_on_other_rows(options):
    text, video = inputs()
    made = head(**options)
    logits = made(text, video)
    noisy = replace(text, words=filled(text.words, text.word_mask))
    padded = video.apply(lambda tensor: filled(tensor, video.frame_mask))
    torch.testing.assert_close(made(noisy, padded), logits)
    rows = [4, 1]
    torch.testing.assert_close(made(text[rows], video[rows]), logits[rows])


def test_every_option_of_the_head_changes_the_answer():
    text, video = inputs()
    usual = head()(text, video)
    for options in ({"pooling": "mean"}, {"spot_ratio": 0.75}, {"inputs": "question"}, {"inputs": "video"}):
        assert not torch.allclose(head(**options)(text, video), usual)
    noisy = head(dropout=0.5).train()
    assert not torch.equal(noisy(text, video), noisy(text, video))


@pytest.mark.parametrize("used", ["question", "video"])
def test_answers_depend_only_on_the_chosen_input(used):
    (text, video), (other_text, other_video) = inputs(), inputs(seed=1)
    made = head(inputs=used, pooling="mean")
    changed = made(text, other_video) if used == "question" else made(other_text, video)
    torch.testing.assert_close(changed, made(text, video))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (head, {"spot_ratio": 1.0}, "spot_ratio is 1.0"),
        (head, {"spot_ratio": 0.25, "pooling": "mean"}, "is an option of pooling: spot"),
        (head, {"micro": True, "inputs": "question"}, "inputs must be both"),
        (module, {"hidden": 0}, "hidden is 0"),
        (module, {"micro": True}, "CLIP4Clip has no patches"),
        (module, {"optimizer": OptimizerConfig(gradient_cache=4)}, "gradient_cache is for losses over a whole"),
        *(
            (module, {"method": partial(CLIP4Clip, **{name: value})}, f"has {name}, which question answering")
            for name, value in {
                "optimizer": OptimizerConfig(lr=1.0), "evaluation": EvaluationConfig(top_k=3), "gather": "none",
            }.items()
        ),
    ],
)  # fmt: skip
def test_conflicting_options_are_rejected(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_ten_steps_lower_the_loss():
    made = module()
    made.vocabulary = list("abcdefg")
    text, video = inputs()
    loss = partial(torch.nn.functional.cross_entropy, target=torch.arange(B))
    losses = descend(lambda: loss(made.logits(text, video)), dict(made.head.named_parameters()), lr=1e-2)
    assert losses[-1] < 0.5 * losses[0]
    made.vocabulary = ["a", "b"]
    assert made.logits(*inputs()).shape == (B, 2)


VQA = ["dpdv-vqa", "fixture", "fixture-vqa"]
SHORT = (*SMALL, "--data.init_args.frames=2", "--data.init_args.captions_per_epoch=one")
FIVE = "--model.init_args.answers=5"


@pytest.fixture(scope="module")
def trained(tiny_root, tmp_path_factory):
    """The folder and the results of a run, and the option that names its checkpoint."""
    folder, results = run("fit", VQA, tiny_root, tmp_path_factory.mktemp("runs"), *SHORT, FIVE)
    return folder, results, f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"


@pytest.fixture(scope="module")
def asked(tiny_root):
    return json.loads((tiny_root / "msrvtt" / "test_qa.json").read_text())


def test_a_run_reports_its_questions_and_answers(trained, asked):
    folder, results, _ = trained
    evaluation = results["evaluation"]
    answers = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["answers"]
    assert results["learned_answers"] == len(answers) == 5
    assert evaluation["questions"] == evaluation["asked"] == len(asked)
    assert evaluation["unknown_answers"] == sum(entry["answer"] not in answers for entry in asked)
    assert evaluation["majority"] == pytest.approx(100 * sum(e["answer"] == answers[0] for e in asked) / len(asked))
    assert results["trained_on"] == results["dataset"] == "synthetic MSRVTT-QA"
    assert results["warnings"] == [SYNTHETIC]
    assert "DPDV" in results["method"]
    assert folder.parent.name == "videoquestionanswering-msrvttqa"
    assert (folder / "checkpoints" / "best.ckpt").is_file()


def test_predictions_have_the_accuracy_of_the_run(trained, tiny_root, tmp_path):
    _, results, ckpt = trained
    places = (f"--data.init_args.root={tiny_root}", f"--results.directory={tmp_path}", "--trainer.accelerator=cpu")
    assert main(["predict", *(f"--config={RECIPES / name}.yaml" for name in VQA), *places, *SHORT, ckpt, FIVE]) == 0
    (path,) = tmp_path.glob("**/predictions.parquet")
    table = pd.read_parquet(path)
    assert len(table) == results["evaluation"]["asked"]
    assert 100 * (table["answer"] == table["right"]).mean() == pytest.approx(results["evaluation"]["accuracy"])
    assert table["probability"].between(0, 1).all()


def test_the_report_shows_questions_with_the_given_and_the_correct_answer(trained, asked, tmp_path):
    (reported,) = read_runs(trained[0])
    arrays = figures_of(reported, tmp_path)
    shown = zip(arrays["answers.question"].tolist(), arrays["answers.right"].tolist(), strict=True)
    assert set(shown) <= {(entry["question"], entry["answer"]) for entry in asked}
    charts = draw(arrays)
    assert len(charts) == 4
    for chart, answer, right in zip(charts, arrays["answers.answer"], arrays["answers.right"], strict=True):
        (image,) = chart.images
        assert answer in image.caption
        assert right in image.caption
        assert image.own == (answer == right)


def test_questions_about_unreadable_videos_are_left_out_and_counted(trained, asked, tiny_root, tmp_path):
    gone, root = f"video{asked[0]['video_id']}", shutil.copytree(tiny_root, tmp_path / "data")
    (root / "msrvtt" / "videos" / f"{gone}.mp4").unlink()
    options = (*SHORT, trained[2], FIVE, "--data.init_args.on_corrupt=skip")
    _, results = run("test", VQA, root, tmp_path / "runs", *options)
    left_out = sum(entry["video_id"] == asked[0]["video_id"] for entry in asked)
    assert results["evaluation"]["without_video"] == left_out > 0
    assert results["evaluation"]["questions"] == len(asked) - left_out
    assert any(gone in line for line in results["skipped"])


@pytest.fixture(scope="module")
def built(recipe):
    """A method and its questions, for runs without the command line."""
    header = "{clip4clip: {similarity_header: {class_path: SeqTransf}}}"
    method = f"--model.init_args.method={{class_path: CLIP4Clip, init_args: {header}}}"
    more = ("--model.init_args.micro=false", "--model.init_args.encoder.init_args.vision_layers=1")
    return recipe("dpdv-vqa", options=(*SHORT[3:], "--trainer.logger=false", method, *more))


def take_a_step(made, data):
    quiet_trainer(max_steps=1, limit_val_batches=0).fit(made, datamodule=data)


def test_training_can_start_from_a_retrieval_checkpoint(built, finished_run, tmp_path):
    (made, data), checkpoint = built, finished_run / "checkpoints" / "last.ckpt"
    made.pretrained, made.optimizer_config = str(checkpoint), replace(made.optimizer_config, encoder_lr=0.0)
    take_a_step(made, data)
    before = torch.load(checkpoint, weights_only=True)["state_dict"]
    encoder = {name: tensor for name, tensor in before.items() if name.startswith("encoder.") and tensor.ndim == 2}
    after = made.method.state_dict()
    torch.testing.assert_close({name: after[name] for name in encoder}, encoder)
    (tmp_path / "cut.ckpt").write_bytes(checkpoint.read_bytes()[:-500])
    for name, message in (("nowhere.ckpt", "no such checkpoint"), ("cut.ckpt", "cannot be read as a checkpoint")):
        made.pretrained = str(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"{name}: {message}"):
            take_a_step(made, data)


def test_what_a_run_needs_is_named(built, finished_run, recipe):
    made, data = built
    checkpoint = torch.load(finished_run / "checkpoints" / "last.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="pretrained"):
        made.on_load_checkpoint(checkpoint)
    weights = str(finished_run / "checkpoints" / "last.ckpt")
    other = VideoQuestionAnswering(made.encoder, partial(DPDV, frames=data.frames), answers=7, pretrained=weights)
    with pytest.raises(CheckpointError, match="contains CLIP4Clip, but the recipe builds DPDV"):
        take_a_step(other, data)
    made.vocabulary = []
    with pytest.raises(CheckpointError, match="--ckpt_path"):
        quiet_trainer().test(made, datamodule=data, verbose=False)
    with pytest.raises(UserError, match="MSRVTT has captions but no questions"):
        take_a_step(made, recipe("clip4clip")[1])


WITH_AUDIO = """
model: {init_args: {method: {class_path: GAID, init_args: {audio_encoder: {class_path: TinyWhisperEncoder,
  init_args: {width: 16, layers: 1, seed: SEED}}}}, tuning: Frozen, encoder: {init_args: {width: 64}}}}
data: {init_args: {root: ROOT, frames: 2, batch_size: 2, num_workers: 0, audio: whisper, audio_seconds: 30}}
trainer: {max_epochs: 1, limit_train_batches: 1, limit_val_batches: 0, accelerator: cpu, log_every_n_steps: 1}
"""


def test_stored_audio_is_used_and_checked_for_a_method_that_needs_it(synthetic, tmp_path, capsys):
    root, store = synthetic("msrvtt", 8), tmp_path / "store"
    for seed in (0, 1):
        (tmp_path / f"{seed}.yaml").write_text(WITH_AUDIO.replace("SEED", str(seed)).replace("ROOT", str(root)))
    (tmp_path / "plain.yaml").write_text("model: {init_args: {micro: false}}")  # `tvr extract` takes recipes alone
    recipes = [RECIPES / "dpdv-vqa.yaml", RECIPES / "fixture.yaml"]

    def options(seed, *more):
        return [*(f"--config={path}" for path in (*recipes, tmp_path / f"{seed}.yaml", tmp_path / "plain.yaml")), *more]

    stored = (f"--results.directory={tmp_path / 'runs'}", f"--data.init_args.features={store}")
    assert main(["extract", *options(0, f"--out={store}", "--num_workers=0")]) == 0
    assert "audio" in FeatureStore(store).parts
    assert main(["fit", *options(0, "--model.init_args.hidden=16", *stored)]) == 0
    assert main(["fit", *options(1, "--model.init_args.hidden=16", *stored)]) == 2
    assert "part 'audio' has other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recipe_beats_the_majority_answer_and_questions_alone_by_twenty_points(synthetic, tmp_path):
    def evaluation(name, *more):
        _, results = run("fit", VQA, synthetic("msrvtt", 250), tmp_path / name, "--data.init_args.num_workers=0", *more)
        return results["evaluation"]

    both = evaluation("both")
    alone = evaluation(
        "alone", "--model.init_args.inputs=question", "--model.init_args.micro=false", "--data.init_args.frames=1",
        "--trainer.max_epochs=6", "--model.init_args.method={class_path: CLIP4Clip}",
    )  # fmt: skip
    assert both["accuracy"] >= both["majority"] + 20
    assert both["accuracy"] >= alone["accuracy"] + 20
