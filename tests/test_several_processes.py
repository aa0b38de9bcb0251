"""Several processes give the same results as one, although they share videos unevenly and some are unreadable."""

import shutil
import tempfile
import warnings
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tvr_lightning.data.loader import EvaluationSampler
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.msrvtt_qa import MSRVTTQA
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.answers import frequent_answers
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.loop import bank_loaders
from tvr_lightning.evaluation.normalization import DualSoftmax, QueryBankNorm
from tvr_lightning.evaluation.reranker import FunctionReranker
from tvr_lightning.evaluation.two_stage import TwoStage
from tvr_lightning.features import IndexedFeatures, TextFeatures
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.video_qa import VideoQuestionAnswering
from tvr_lightning.metrics import MRR
from tvr_lightning.testing import run_processes
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.distributed import gather_batches
from tvr_lightning.training.optim import OptimizerConfig

BANK = 16
VIDEOS = 5  # of the test split; process r of two reads r, r + 2, ...
TEST = [0, 1, 3]
SIZES = {"frames": 2, "words": 12, "image_size": 32, "batch_size": 6, "eval_batch_size": 2, "num_workers": 0}


def trainer(world, **options):
    if world > 1:
        options |= {"devices": world, "strategy": "ddp_find_unused_parameters_true"}
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    return quiet_trainer(**options)


def tiny():
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1, context_length=16)


def content_score(caption, video):
    return (len(caption) * video.stat().st_size) % 97 / 10


def unread_by(method):
    """Files that no process could read."""
    return [reason.split(":")[0] for reason in method.encoded.skipped_anywhere()]


def retrieve(root, world, normalization):
    """Results of testing and predicting, and a bank of training texts and videos."""
    evaluation = EvaluationConfig(normalization=normalization, metrics=[MRR()], top_k=3, bank_size=BANK)
    method = CLIP4Clip(tiny(), evaluation=evaluation, words=12, frames=2)
    data, run = MSRVTT(root=root, on_corrupt="skip", **SIZES), trainer(world)
    run.test(method, datamodule=data, verbose=False)
    tested = method.evaluation
    found = {"test": [tested.text_to_video, tested.video_to_text, tested.texts, tested.videos, tested.partial]}
    for ranks in (tested.text_to_video_ranks, tested.video_to_text_ranks):
        found["test"] += [ranks.better.tolist(), ranks.tied.tolist(), ranks.index.tolist()]
    found["test"].append(tested.measured.get("reranked pairs (number)"))
    table = {f"test/t2v_{name}": value for name, value in tested.text_to_video.items()}
    table |= {f"test/v2t_{name}": value for name, value in tested.video_to_text.items()}
    assert run.callback_metrics == table | {"test/SumR": tested.sum_of_recalls}
    run.predict(method, datamodule=data, return_predictions=False)
    texts, scores, videos = method.predictions
    found["predict"] = [texts.tolist(), videos.tolist()]
    bank = method.bank()
    found["bank"] = [len(bank.texts), len(bank.videos)]
    found["values"] = torch.cat([scores.flatten(), bank.texts.sentence[:, 0], bank.videos.frames[:, 0, 0]]).tolist()
    found["skipped"] = unread_by(method)
    return found


def answer(root, world):
    """Results of testing and predicting with question answering."""
    method = VideoQuestionAnswering(tiny(), partial(CLIP4Clip, words=12, frames=2), answers=7, hidden=16)
    data = MSRVTTQA(root=root, on_corrupt="skip", **SIZES)
    method.vocabulary = frequent_answers([question.answer for question in data.questions("train")], 7)
    run = trainer(world)
    run.test(method, datamodule=data, verbose=False)
    found = method.evaluation
    result = [run.callback_metrics["test/accuracy"].item(), found.accuracy, found.questions, found.without_video]
    run.predict(method, datamodule=data, return_predictions=False)
    answers = [[row["question"], row["video_id"], row["answer"]] for row in method.predictions]
    return {"test": result, "predict": answers, "skipped": unread_by(method)}


def fit(root, world):
    """Weights after one epoch, the number of pairs of every step, and the skipped videos."""
    method = CLIP4Clip(tiny(), optimizer=OptimizerConfig(lr=1e-2, encoder_lr=1e-2, warmup=0.0), words=12, frames=2)
    sizes = []
    method.on_train_batch_start = lambda batch, batch_idx: sizes.append(len(batch))
    data = MSRVTT(root=root, on_corrupt="skip", captions_per_epoch="one", **SIZES)
    trainer(world, max_epochs=1, log_every_n_steps=1).fit(method, datamodule=data)
    weights = torch.cat([parameter.detach().flatten() for parameter in method.parameters()])
    found = method.evaluation
    return {
        "seen": [found.texts, found.videos, found.partial],
        "sizes": sizes,
        "weights": weights,
        "skipped": unread_by(method),
    }


def nothing_left(root, world):
    method = CLIP4Clip(tiny(), words=12, frames=2)
    with pytest.raises(UserError) as raised:
        trainer(world).test(method, datamodule=MSRVTT(root=root, on_corrupt="skip", **SIZES), verbose=False)
    return str(raised.value)


def uneven(rank):
    """Gather three items of the first process and none of the others, and then none of any."""
    batches = []
    for item in [] if rank else [0, 2, 5]:
        words = torch.full((1, 2, 3), float(item))
        text = TextFeatures(words[:, 0].double(), words, torch.tensor([[True, item > 1]]))
        batches.append(IndexedFeatures(torch.tensor([item]), text))
    found = gather_batches(batches, torch.device("cpu"))
    index, text = found.index, found.features
    kinds = [str(tensor.dtype) for tensor in (index, text.sentence, text.words, text.word_mask)]
    nothing = gather_batches([], torch.device("cpu"))
    return [index.tolist(), text.sentence[:, 0].tolist(), text.word_mask[:, 1].tolist(), kinds, nothing]


def everything(rank, roots, world):
    """Results for all tests from the same processes, because processes are slow to start."""
    found = {"fit": fit(roots["fit"], world), "nothing": nothing_left(roots["nothing"], world)}
    found["retrieval"] = retrieve(roots["test"], world, QueryBankNorm())
    found["retrieval from both"] = retrieve(roots["fit"], world, DualSoftmax(5.0))
    with tempfile.TemporaryDirectory() as scores:
        stages = TwoStage(2, reranker=FunctionReranker(content_score), scores_folder=scores)
        found["reranked"] = retrieve(roots["fit"], world, stages)
    found["answers"] = answer(roots["test"], world)
    return found | ({"uneven": uneven(rank)} if world > 1 else {})


def broken(whole, folder, test, train):
    """Copy the dataset with some videos of its splits replaced by unreadable files."""
    shutil.copytree(whole, folder)
    data = MSRVTT(root=str(folder), **SIZES)
    for name, places in (("test", test), ("train", train)):
        for place in places:
            data.read_split(name).videos[place].path.write_bytes(b"no video")
    return str(folder)


@pytest.fixture(scope="module")
def roots(tmp_path_factory, synthetic):
    folder = tmp_path_factory.mktemp("unreadable")
    whole = synthetic("msrvtt", 5 * VIDEOS)
    # Videos to test on and to train on. In "test", the second process can read none to test on.
    unreadable = {"test": (TEST, range(10)), "fit": ([2], [0, 4, 8]), "nothing": (range(VIDEOS), [])}
    return {name: broken(whole, folder / name, *places) for name, places in unreadable.items()}


@pytest.fixture(scope="module")
def alone(roots):
    return everything(0, roots, 1)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def several(roots, request):
    return run_processes(everything, request.param, roots, request.param)


def test_several_processes_give_the_results_of_one(alone, several):
    expected, answers = alone["retrieval"], alone["answers"]
    assert expected["test"][3] == VIDEOS - len(TEST)
    assert sum(expected["bank"]) + len(expected["skipped"]) == 2 * BANK + len(TEST)
    assert expected["bank"][1] < BANK
    assert answers["test"][3] > 0  # questions without a video
    assert len(answers["skipped"]) == len(TEST)
    assert all(found["answers"] == answers for found in several)
    assert len(set(alone["retrieval from both"]["test"][5])) > 2  # the ranks of an untrained method differ
    assert alone["reranked"]["test"][-1] > VIDEOS  # pairs
    for name in ("retrieval", "retrieval from both", "reranked"):
        expected = dict(alone[name])
        values = expected.pop("values")
        for found in several:
            assert found[name].pop("values") == pytest.approx(values, rel=1e-4, abs=1e-6)
            assert found[name] == expected


def test_readable_videos_replace_unreadable_ones_in_training(alone, several):
    (first, *others), expected = [found["fit"] for found in several], alone["fit"]
    assert set(expected["sizes"]) == {6}
    for found in (first, *others):
        assert set(found["sizes"]) == {6 // len(several)}
        assert found["skipped"] == expected["skipped"]
        assert found["seen"] == expected["seen"] == [VIDEOS - 1, VIDEOS - 1, True]
        assert torch.equal(found["weights"], first["weights"])
    assert len(expected["skipped"]) > 1  # one to validate on, others to train on
    if len(several) == 2:  # for three, an epoch is padded to one more step
        assert (first["weights"] - expected["weights"]).norm() < 1e-3 * expected["weights"].norm()


def test_a_split_without_readable_videos_fails_on_every_process(alone, several):
    assert "the evaluation loaders returned no videos; skipped: " in alone["nothing"]
    assert {found["nothing"] for found in several} == {alone["nothing"]}


def test_unequal_batches_are_gathered_with_their_types(several):
    kinds = ["torch.int64", "torch.float64", "torch.float32", "torch.bool"]
    for found in several:
        assert found["uneven"] == [[0, 2, 5], [0.0, 2.0, 5.0], [False, True, True], kinds, None]


def loader(items, replicas=1, rank=0):
    sampler = EvaluationSampler(items, replicas=replicas, rank=rank)
    return DataLoader(TensorDataset(torch.arange(items)), batch_size=2, sampler=sampler)


def test_a_bank_is_sampled_from_the_whole_split_and_shared_by_processes():
    def drawn_by(seed, *share):
        (found,) = bank_loaders([loader(40, *share)], 7, seed)
        return torch.cat([batch[0] for batch in found]).tolist()

    drawn = drawn_by(0)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 7
    assert max(drawn) > 20 > min(drawn)
    shares = [drawn_by(0, 2, rank) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == 4
    assert sorted(set(shares[0] + shares[1])) == drawn
    assert drawn_by(1) != drawn
    small = loader(5)
    assert bank_loaders([small], 5, 0) == [small]
