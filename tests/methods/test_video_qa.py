"""Question answering on a retrieval method's features: the head's parts, what is refused, runs on real videos."""

import json
from functools import partial

import pandas as pd
import pytest
import torch
from methods.parts import RECIPES, SMALL, descend, encoder, run

from tvr_lightning.cli import main
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.clip4clip import CLIP4Clip
from tvr_lightning.methods.dpdv.method import DPDV
from tvr_lightning.methods.video_qa import AnswerHead, VideoQuestionAnswering, words_patches
from tvr_lightning.reproduce.report.figures.figure_types import draw, figures_of
from tvr_lightning.reproduce.report.sources import read_runs
from tvr_lightning.store import FeatureStore
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.optim import OptimizerConfig

B, W, F, P, D = 6, 5, 4, 3, 64


def features(seed=0):
    generator = torch.Generator().manual_seed(seed)
    words = torch.arange(W) < torch.tensor([5, 3, 4, 5, 2, 3])[:, None]
    mask = torch.arange(F) < torch.tensor([4, 3, 1, 2, 4, 4])[:, None]
    text = TextFeatures(torch.randn(B, D, generator=generator), torch.randn(B, W, D, generator=generator), words)
    shown = torch.randn(B, F, D, generator=generator)
    return text, VideoFeatures(shown, mask, torch.randn(B, F, P, D, generator=generator))


def head(**options):
    torch.manual_seed(0)
    return AnswerHead(D, 7, hidden=16, **options).eval()


def module(method=CLIP4Clip, **options):
    options = {"answers": 7, "hidden": 16, "dropout": 0.0} | options
    return VideoQuestionAnswering(encoder(), partial(method, words=W, frames=F), **options)


# The head


def test_the_question_spots_half_of_the_frames_that_are_there():
    text, video = features()
    chosen = head().spotted(text.sentence, video)
    assert not (chosen & ~video.frame_mask).any()
    assert chosen.sum(1).tolist() == [2, 2, 1, 1, 2, 2]
    cosine = torch.cosine_similarity(video.frames, text.sentence[:, None], dim=-1)
    for i in range(B):
        left = video.frame_mask[i] & ~chosen[i]
        if left.any():
            assert cosine[i][chosen[i]].min() >= cosine[i][left].max()


def test_words_take_their_most_similar_patch_in_loops():
    text, video = features()
    chosen = video.frame_mask
    found = words_patches(text, video.patches, chosen)
    for i in range(B):
        flat = [video.patches[i, f, p] for f in range(F) if chosen[i, f] for p in range(P)]
        taken = []
        for word in text.words[i][text.word_mask[i]]:
            taken.append(max(flat, key=lambda patch, word=word: torch.cosine_similarity(patch, word, dim=0).item()))
        torch.testing.assert_close(found[i], torch.stack(taken).mean(0))


@pytest.mark.parametrize("options", [{}, {"pooling": "mean"}, {"micro": True}])
def test_answers_do_not_depend_on_padding_nor_on_other_rows(options):
    text, video = features()
    made = head(**options)
    logits = made(text, video)
    padded = VideoFeatures(
        torch.where(video.frame_mask[..., None], video.frames, 9.0),
        video.frame_mask,
        torch.where(video.frame_mask[..., None, None], video.patches, 9.0),
    )
    words = torch.where(text.word_mask[..., None], text.words, -9.0)
    torch.testing.assert_close(made(TextFeatures(text.sentence, words, text.word_mask), padded), logits)
    rows = [4, 1]
    torch.testing.assert_close(made(text[rows], video[rows]), logits[rows])


def test_every_option_of_the_head_changes_the_answer():
    text, video = features()
    usual = head()(text, video)
    for options in ({"pooling": "mean"}, {"spot_ratio": 0.75}, {"inputs": "question"}, {"inputs": "video"}):
        assert not torch.allclose(head(**options)(text, video), usual)
    assert head(micro=True).classify[2].in_features == 3 * D
    noisy = head(dropout=0.5).train()
    assert not torch.equal(noisy(text, video), noisy(text, video))


@pytest.mark.parametrize("inputs", ["question", "video"])
def test_what_an_answer_may_not_depend_on_it_does_not(inputs):
    (text, video), (other_text, other_video) = features(), features(seed=1)
    made = head(inputs=inputs, pooling="mean")
    changed = made(text, other_video) if inputs == "question" else made(other_text, video)
    torch.testing.assert_close(changed, made(text, video))


# The module


def test_any_method_can_give_the_features_and_micro_needs_patches():
    assert isinstance(module(DPDV, micro=True).method, DPDV)
    assert module(DPDV, micro=True).needs_patches


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (head, {"spot_ratio": 1.0}, "spot_ratio is 1.0"),
        (head, {"spot_ratio": 0.25, "pooling": "mean"}, "is an option of pooling: spot"),
        (head, {"dropout": 1.0}, "dropout is 1.0"),
        (head, {"micro": True, "inputs": "question"}, "inputs must be both"),
        (module, {"hidden": 0}, "hidden is 0"),
        (module, {"micro": True}, "CLIP4Clip has no patches"),
        (module, {"optimizer": OptimizerConfig(gradient_cache=4)}, "gradient_cache is for losses over a whole"),
        (
            module,
            {"method": partial(CLIP4Clip, optimizer=OptimizerConfig(lr=1.0))},
            "has optimizer, which question answering",
        ),
        (module, {"method": partial(CLIP4Clip, evaluation=EvaluationConfig(top_k=3))}, "has evaluation, which"),
        (module, {"method": partial(CLIP4Clip, gather="none")}, "has gather, which"),
    ],
)
def test_options_that_conflict_are_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_ten_steps_lower_the_loss_of_learnt_answers():
    made = module()
    made.vocabulary = list("abcdefg")
    text, video = features()
    losses = descend(
        lambda: torch.nn.functional.cross_entropy(made.logits(text, video), torch.arange(B)),
        made.head.named_parameters(),
        lr=1e-2,
    )
    assert losses[-1] < 0.5 * losses[0]
    made.vocabulary = ["a", "b"]
    assert made.logits(*features()).shape == (B, 2)


# Runs


VQA = ["dpdv-vqa", "fixture", "fixture-vqa"]
SHORT = (*SMALL, "--data.init_args.frames=2", "--data.init_args.captions_per_epoch=one")
FIVE = "--model.init_args.answers=5"


def arguments(root, runs, *more):
    places = (f"--data.init_args.root={root}", f"--results.directory={runs}", "--trainer.accelerator=cpu")
    return [*(f"--config={RECIPES / name}.yaml" for name in VQA), *places, *SHORT, *more]


@pytest.fixture(scope="module")
def trained(tiny_root, tmp_path_factory):
    """The folder and the results of a run, and the option that names its checkpoint."""
    folder, results = run("fit", VQA, tiny_root, tmp_path_factory.mktemp("runs"), *SHORT, FIVE)
    return folder, results, f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"


@pytest.fixture(scope="module")
def asked(tiny_root):
    return json.loads((tiny_root / "msrvtt" / "test_qa.json").read_text())


def test_a_run_leaves_a_table_with_everything_counted(trained, asked):
    folder, results, _ = trained
    evaluation = results["evaluation"]
    answers = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["answers"]
    assert results["learnt_answers"] == len(answers) == 5
    assert evaluation["questions"] == evaluation["asked"] == len(asked)
    assert evaluation["unknown_answers"] == sum(entry["answer"] not in answers for entry in asked)
    assert evaluation["majority"] == pytest.approx(100 * sum(e["answer"] == answers[0] for e in asked) / len(asked))
    assert results["trained_on"] == results["dataset"] == "synthetic MSRVTT-QA"
    assert results["warnings"] == [SYNTHETIC]
    assert "DPDV" in results["method"]
    assert folder.parent.name == "videoquestionanswering-msrvttqa"
    assert (folder / "checkpoints" / "best.ckpt").is_file()


def test_test_and_predict_repeat_what_the_run_found(trained, tiny_root, tmp_path):
    _, results, ckpt = trained
    _, again = run("test", VQA, tiny_root, tmp_path, *SHORT, FIVE, ckpt)
    assert again["evaluation"] == results["evaluation"]
    assert main(["predict", *arguments(tiny_root, tmp_path, ckpt, FIVE)]) == 0
    (path,) = tmp_path.glob("**/predictions.parquet")
    table = pd.read_parquet(path)
    assert len(table) == again["evaluation"]["asked"]
    assert 100 * (table["answer"] == table["right"]).mean() == pytest.approx(again["evaluation"]["accuracy"])
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


def test_videos_that_cannot_be_read_leave_their_questions_out_and_counted(trained, asked, tiny_root, tmp_path):
    gone, place = f"video{asked[0]['video_id']}", tmp_path / "data" / "msrvtt"
    (place / "videos").mkdir(parents=True)
    for path in (tiny_root / "msrvtt" / "videos").iterdir():
        if path.stem != gone:
            (place / "videos" / path.name).symlink_to(path)
    for name in ("train", "val", "test"):
        (place / f"{name}_qa.json").symlink_to(tiny_root / "msrvtt" / f"{name}_qa.json")
    options = (*SHORT, trained[2], FIVE, "--data.init_args.on_corrupt=skip")
    _, results = run("test", VQA, tmp_path / "data", tmp_path / "runs", *options)
    left_out = sum(entry["video_id"] == asked[0]["video_id"] for entry in asked)
    assert results["evaluation"]["without_video"] == left_out > 0
    assert results["evaluation"]["questions"] == len(asked) - left_out
    assert any(gone in line for line in results["skipped"])


@pytest.mark.parametrize(
    ("command", "options", "code", "message"),
    [
        ("test", (), 1, "--ckpt_path"),
        ("fit", ("--data.class_path=MSRVTT", "--data.init_args.split=9k"), 1, "MSRVTT has captions but no questions"),
        (
            "fit",
            ("--model.init_args.encoder.init_args.encoder_precision=float16", "--trainer.precision=bf16-mixed"),
            2,
            "encoder_precision float16 trains CLIP's own float16 weights",
        ),
    ],
)
def test_runs_that_cannot_work_are_refused(tiny_root, tmp_path, capsys, command, options, code, message):
    assert main([command, *arguments(tiny_root, tmp_path, *options)]) == code
    assert message in capsys.readouterr().err


def test_a_retrieval_checkpoint_starts_a_run_and_does_not_pass_for_one(tiny_root, tmp_path, capsys):
    folder, _ = run("fit", ["clip4clip", "fixture"], tiny_root, tmp_path, *SHORT)
    checkpoint = folder / "checkpoints" / "last.ckpt"
    answering = (
        "--model.init_args.method={class_path: CLIP4Clip, "
        "init_args: {clip4clip: {similarity_header: {class_path: SeqTransf}}}}",
        "--model.init_args.micro=false",
    )
    pretrained = "--model.init_args.pretrained"
    options = (*SHORT, *answering, f"{pretrained}={checkpoint}", "--model.init_args.optimizer.encoder_lr=0")
    made, _ = run("fit", VQA, tiny_root, tmp_path, *options)
    before, after = (
        torch.load(path, weights_only=True)["state_dict"] for path in (checkpoint, made / "checkpoints" / "last.ckpt")
    )
    name = next(key for key in before if key.startswith("encoder.") and before[key].ndim == 2)
    torch.testing.assert_close(after[f"method.{name}"], before[name])
    for command, more, message in (
        ("test", (*answering, f"--ckpt_path={checkpoint}"), "pretrained"),
        ("fit", (f"{pretrained}={checkpoint}",), "contains CLIP4Clip, but the recipe builds DPDV"),
        ("fit", (*answering, f"{pretrained}=nowhere.ckpt"), "nowhere.ckpt"),
    ):
        capsys.readouterr()
        assert main([command, *arguments(tiny_root, tmp_path, *more)]) == 1
        assert message in capsys.readouterr().err


HEARING = """
model: {init_args: {method: {class_path: GAID, init_args: {audio_encoder: {class_path: TinyWhisperEncoder,
  init_args: {width: 16, layers: 1, seed: SEED}}}}, tuning: Frozen, encoder: {init_args: {width: 64}}}}
data: {init_args: {root: ROOT, frames: 2, batch_size: 8, num_workers: 0, audio: whisper, audio_seconds: 30}}
trainer: {max_epochs: 1, limit_train_batches: 1, limit_val_batches: 0, accelerator: cpu, log_every_n_steps: 1}
"""


def test_a_method_with_audio_within_another_is_extracted_and_checked_with_its_audio(tiny_root, tmp_path, capsys):
    store = tmp_path / "store"
    for seed in (0, 1):
        (tmp_path / f"{seed}.yaml").write_text(HEARING.replace("SEED", str(seed)).replace("ROOT", str(tiny_root)))
    (tmp_path / "plain.yaml").write_text("model: {init_args: {micro: false}}")  # `tvr extract` takes recipes alone
    recipes = [RECIPES / "dpdv-vqa.yaml", RECIPES / "fixture.yaml"]

    def options(seed, *more):
        return [*(f"--config={path}" for path in (*recipes, tmp_path / f"{seed}.yaml", tmp_path / "plain.yaml")), *more]

    stored = (f"--results.directory={tmp_path / 'runs'}", f"--data.init_args.features={store}")
    assert main(["extract", *options(0, f"--out={store}", "--num_workers=1")]) == 0
    assert "audio" in FeatureStore(store).parts
    assert main(["fit", *options(0, "--model.init_args.hidden=16", *stored)]) == 0
    assert main(["fit", *options(1, "--model.init_args.hidden=16", *stored)]) == 2
    assert "part 'audio' has other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recipe_beats_the_majority_answer_and_questions_alone_by_twenty_points(tmp_path):
    synthesize("msrvtt", tmp_path, 250, 0, progress=False)

    def evaluation(name, *more):
        _, results = run("fit", VQA, tmp_path, tmp_path / name, "--data.init_args.num_workers=0", *more)
        return results["evaluation"]

    both = evaluation("both")
    alone = evaluation(
        "alone", "--model.init_args.inputs=question", "--model.init_args.micro=false", "--data.init_args.frames=1",
        "--trainer.max_epochs=6", "--model.init_args.method={class_path: CLIP4Clip}",
    )  # fmt: skip
    assert both["accuracy"] >= both["majority"] + 20
    assert both["accuracy"] >= alone["accuracy"] + 20
