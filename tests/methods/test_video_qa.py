"""Question answering on a retrieval method's features: the head's parts, what is refused, runs on real videos."""

import json
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from lightning.pytorch import Trainer

from tvr_lightning.cli import main
from tvr_lightning.data.msrvtt_qa import MSRVTTQA
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.encoders.tiny import TinyClipEncoder
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

RECIPES = Path(__file__).parents[2] / "recipes"
B, W, F, P, D = 6, 5, 4, 3, 64


def features(seed=0, frames=F):
    generator = torch.Generator().manual_seed(seed)
    words = torch.arange(W) < torch.tensor([5, 3, 4, 5, 2, 3])[:, None]
    mask = torch.arange(frames) < torch.tensor([4, 3, 1, 2, 4, 4])[:, None]
    text = TextFeatures(torch.randn(B, D, generator=generator), torch.randn(B, W, D, generator=generator), words)
    shown = torch.randn(B, frames, D, generator=generator)
    return text, VideoFeatures(shown, mask, torch.randn(B, frames, P, D, generator=generator))


def head(**options):
    torch.manual_seed(0)
    return AnswerHead(D, 7, hidden=16, **options).eval()


def tiny():
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1, context_length=16)


def module(method=CLIP4Clip, **options):
    return VideoQuestionAnswering(
        tiny(), partial(method, words=W, frames=F), answers=7, **({"hidden": 16, "dropout": 0.0} | options)
    )


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


@pytest.mark.parametrize(("inputs", "ignored"), [("question", "video"), ("video", "question")])
def test_what_an_answer_may_not_depend_on_it_does_not(inputs, ignored):
    text, video = features()
    other_text, other_video = features(seed=1)
    made = head(inputs=inputs, pooling="mean")
    changed = made(text, other_video) if ignored == "video" else made(other_text, video)
    torch.testing.assert_close(changed, made(text, video))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spot_ratio": 1.0}, "spot_ratio is 1.0"),
        ({"spot_ratio": 0.25, "pooling": "mean"}, "is an option of pooling: spot"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"micro": True, "inputs": "question"}, "inputs must be both"),
    ],
)
def test_options_that_conflict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        head(**options)
    with pytest.raises(ValueError, match="hidden is 0"):
        AnswerHead(D, 7, hidden=0)


# The module


def test_any_method_can_give_the_features_and_micro_needs_patches():
    assert isinstance(module(DPDV, micro=True).method, DPDV)
    assert module(DPDV, micro=True).needs_patches
    with pytest.raises(ValueError, match="CLIP4Clip has no patches"):
        module(micro=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": OptimizerConfig(gradient_cache=4)}, "optimizer.gradient_cache is for losses over a whole"),
        ({"method": partial(CLIP4Clip, optimizer=OptimizerConfig(lr=1.0))}, "has optimizer, which question answering"),
        ({"method": partial(CLIP4Clip, evaluation=EvaluationConfig(top_k=3))}, "has evaluation, which"),
        ({"method": partial(CLIP4Clip, gather="none")}, "has gather, which"),
    ],
)
def test_options_that_answering_would_ignore_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        module(**options)


def test_ten_steps_lower_the_loss():
    made = module()
    made.vocabulary = list("abcdefg")
    text, video = features()
    right = torch.arange(B)
    optimizer = torch.optim.Adam(made.head.parameters(), lr=1e-2)
    history = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(made.logits(text, video), right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.5 * history[0]


def test_only_learnt_answers_can_be_given():
    made = module()
    made.vocabulary = ["a", "b"]
    assert made.logits(*features()).shape == (B, 2)


# Runs


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("vqa")
    synthesize("msrvtt", root, 20, 0, workers=1, progress=False)
    return root


def overlay(root, runs, *more):
    return [
        *[f"--config={RECIPES / name}" for name in ("dpdv-vqa.yaml", "fixture.yaml", "fixture-vqa.yaml")],
        f"--data.init_args.root={root}", "--data.init_args.batch_size=8", "--data.init_args.num_workers=0",
        "--data.init_args.frames=2", "--data.init_args.captions_per_epoch=one",
        "--model.init_args.encoder.init_args.width=64", "--trainer.max_epochs=1", "--trainer.accelerator=cpu",
        "--trainer.check_val_every_n_epoch=1", "--trainer.log_every_n_steps=1", f"--results.directory={runs}", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(root, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    assert main(["fit", *overlay(root, runs, "--model.init_args.answers=5")]) == 0
    (folder,) = runs.glob("videoquestionanswering-msrvttqa/version_0")
    return folder


def test_a_run_leaves_a_table_with_everything_counted(run, root):
    results = json.loads((run / "results.json").read_text())
    evaluation = results["evaluation"]
    asked = json.loads((root / "msrvtt" / "test_qa.json").read_text())
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    answers = checkpoint["answers"]
    assert results["learnt_answers"] == len(answers) == 5
    assert evaluation["questions"] == evaluation["asked"] == len(asked)
    assert evaluation["unknown_answers"] == sum(entry["answer"] not in answers for entry in asked)
    assert evaluation["majority"] == pytest.approx(100 * sum(e["answer"] == answers[0] for e in asked) / len(asked))
    assert results["trained_on"] == results["dataset"] == "synthetic MSRVTT-QA"
    assert results["warnings"] == [SYNTHETIC]
    assert "DPDV" in results["method"]
    assert (run / "checkpoints" / "best.ckpt").is_file()


def test_test_and_predict_repeat_what_the_run_found(run, root, tmp_path):
    ckpt = f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    options = overlay(root, tmp_path, ckpt, "--model.init_args.answers=5")
    assert main(["test", *options]) == 0
    (again,) = tmp_path.glob("*/*/results.json")
    first, second = (json.loads(path.read_text())["evaluation"] for path in (run / "results.json", again))
    assert second == first
    assert main(["predict", *options]) == 0
    (path,) = tmp_path.glob("**/predictions.parquet")
    table = pd.read_parquet(path)
    assert len(table) == first["asked"]
    assert 100 * (table["answer"] == table["right"]).mean() == pytest.approx(first["accuracy"])
    assert table["probability"].between(0, 1).all()


def test_the_report_shows_questions_with_the_given_and_the_correct_answer(run, root, tmp_path):
    (reported,) = read_runs(run)
    arrays = figures_of(reported, tmp_path)
    entries = json.loads((root / "msrvtt" / "test_qa.json").read_text())
    shown = zip(arrays["answers.question"].tolist(), arrays["answers.right"].tolist(), strict=True)
    assert set(shown) <= {(entry["question"], entry["answer"]) for entry in entries}
    charts = draw(arrays)
    assert len(charts) == 4
    for chart, answer, right in zip(charts, arrays["answers.answer"], arrays["answers.right"], strict=True):
        (image,) = chart.images
        assert answer in image.caption
        assert right in image.caption
        assert image.own == (answer == right)


def test_videos_that_cannot_be_read_leave_their_questions_out_and_counted(run, root, tmp_path):
    asked = json.loads((root / "msrvtt" / "test_qa.json").read_text())
    gone = f"video{asked[0]['video_id']}"
    place = tmp_path / "data" / "msrvtt"
    (place / "videos").mkdir(parents=True)
    for path in (root / "msrvtt" / "videos").iterdir():
        if path.stem != gone:
            (place / "videos" / path.name).symlink_to(path)
    for name in ("train", "val", "test"):
        (place / f"{name}_qa.json").symlink_to(root / "msrvtt" / f"{name}_qa.json")
    ckpt = f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    more = (ckpt, "--model.init_args.answers=5", "--data.init_args.on_corrupt=skip")
    assert main(["test", *overlay(tmp_path / "data", tmp_path / "runs", *more)]) == 0
    (path,) = (tmp_path / "runs").glob("*/*/results.json")
    results = json.loads(path.read_text())
    left_out = sum(entry["video_id"] == asked[0]["video_id"] for entry in asked)
    assert results["evaluation"]["without_video"] == left_out > 0
    assert results["evaluation"]["questions"] == len(asked) - left_out
    assert any(gone in line for line in results["skipped"])


def test_testing_without_a_checkpoint_says_what_is_missing(root, tmp_path, capsys):
    assert main(["test", *overlay(root, tmp_path)]) == 1
    assert "--ckpt_path" in capsys.readouterr().err


def test_datasets_without_questions_are_refused(root, tmp_path, capsys):
    more = ("--data.class_path=MSRVTT", "--data.init_args.split=9k")
    assert main(["fit", *overlay(root, tmp_path, *more)]) == 1
    assert "MSRVTT has captions but no questions" in capsys.readouterr().err


def test_a_precision_that_the_encoder_cannot_run_under_is_refused(root, tmp_path, capsys):
    more = ("--model.init_args.encoder.init_args.encoder_precision=float16", "--trainer.precision=bf16-mixed")
    assert main(["fit", *overlay(root, tmp_path, *more)]) == 2
    assert "encoder_precision float16 trains CLIP's own float16 weights" in capsys.readouterr().err
    made = module()
    made.method.encoder.encoder_precision = "float16"
    trainer = Trainer(
        accelerator="cpu", precision="bf16-mixed", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"float16.*not with trainer\.precision bf16-mixed"):
        trainer.fit(made, datamodule=MSRVTTQA(root=str(root), num_workers=0))


def test_a_retrieval_checkpoint_starts_a_run_and_does_not_pass_for_one(root, tmp_path, capsys):
    shared = overlay(root, tmp_path)[3:]
    retrieval = [f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}", *shared]
    assert main(["fit", *retrieval]) == 0
    (checkpoint,) = tmp_path.glob("clip4clip-msrvtt/version_0/checkpoints/last.ckpt")
    answering = (
        "--model.init_args.method={class_path: CLIP4Clip, "
        "init_args: {clip4clip: {similarity_header: {class_path: SeqTransf}}}}",
        "--model.init_args.micro=false",
    )
    from_it = (*answering, f"--model.init_args.pretrained={checkpoint}", "--model.init_args.optimizer.encoder_lr=0")
    assert main(["fit", *overlay(root, tmp_path, *from_it)]) == 0
    (made,) = tmp_path.glob("videoquestionanswering-msrvttqa/version_0/checkpoints/last.ckpt")
    before, after = (torch.load(path, weights_only=True)["state_dict"] for path in (checkpoint, made))
    name = next(key for key in before if key.startswith("encoder.") and before[key].ndim == 2)
    torch.testing.assert_close(after[f"method.{name}"], before[name])
    capsys.readouterr()
    assert main(["test", *overlay(root, tmp_path, *answering, f"--ckpt_path={checkpoint}")]) == 1
    assert "pretrained" in capsys.readouterr().err
    assert main(["fit", *overlay(root, tmp_path, f"--model.init_args.pretrained={checkpoint}")]) == 1
    assert "contains CLIP4Clip, but the recipe builds DPDV" in capsys.readouterr().err
    missing = (*answering, "--model.init_args.pretrained=nowhere.ckpt")
    assert main(["fit", *overlay(root, tmp_path, *missing)]) == 1
    assert "nowhere.ckpt" in capsys.readouterr().err


HEARING = """
model: {init_args: {method: {class_path: GAID, init_args: {audio_encoder: {class_path: TinyWhisperEncoder,
  init_args: {width: 16, layers: 1, seed: SEED}}}}, tuning: Frozen, encoder: {init_args: {width: 64}}}}
data: {init_args: {root: ROOT, frames: 2, batch_size: 8, num_workers: 0, audio: whisper, audio_seconds: 30}}
trainer: {max_epochs: 1, limit_train_batches: 1, limit_val_batches: 0, accelerator: cpu, log_every_n_steps: 1}
"""


def test_a_method_that_hears_within_another_is_extracted_and_checked_with_its_sound(root, tmp_path, capsys):
    store = tmp_path / "store"
    for seed in (0, 1):
        text = HEARING.replace("SEED", str(seed)).replace("ROOT", str(root))
        (tmp_path / f"{seed}.yaml").write_text(text)
    recipes = [RECIPES / "dpdv-vqa.yaml", RECIPES / "fixture.yaml"]

    def options(seed: int) -> list[str]:
        return [f"--config={path}" for path in (*recipes, tmp_path / f"{seed}.yaml")]

    stored = [
        "--model.init_args.micro=false",
        "--model.init_args.hidden=16",
        f"--results.directory={tmp_path / 'runs'}",
        f"--data.init_args.features={store}",
    ]
    extracting = tmp_path / "plain.yaml"  # `tvr extract` takes recipes alone
    extracting.write_text("model: {init_args: {micro: false}}")
    assert main(["extract", *options(0), f"--config={extracting}", f"--out={store}"]) == 0
    assert "audio" in FeatureStore(store).parts
    assert main(["fit", *options(0), *stored]) == 0
    assert main(["fit", *options(1), *stored]) == 2
    assert "part 'audio' has other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recipe_beats_the_majority_answer_and_questions_alone_by_twenty_points(tmp_path):
    synthesize("msrvtt", tmp_path, 250, 0, progress=False)

    def evaluation(name, *more):
        configs = [f"--config={RECIPES / file}" for file in ("dpdv-vqa.yaml", "fixture.yaml", "fixture-vqa.yaml")]
        options = [f"--data.init_args.root={tmp_path}", "--trainer.accelerator=cpu", "--data.init_args.num_workers=0"]
        assert main(["fit", *configs, *options, f"--results.directory={tmp_path / name}", *more]) == 0
        (path,) = (tmp_path / name).glob("*/*/results.json")
        return json.loads(path.read_text())["evaluation"]

    both = evaluation("both")
    alone = evaluation(
        "alone", "--model.init_args.inputs=question", "--model.init_args.micro=false", "--data.init_args.frames=1",
        "--trainer.max_epochs=6",
        "--model.init_args.method={class_path: CLIP4Clip}",
    )  # fmt: skip
    assert both["accuracy"] >= both["majority"] + 20
    assert both["accuracy"] >= alone["accuracy"] + 20
