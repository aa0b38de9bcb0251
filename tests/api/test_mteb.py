"""MTEB's runner gets the same scores of a tiny task as the method and the encoder."""

import re
from pathlib import Path

import datasets
import mteb
import pytest
import sound_files
import torch
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.models.models_protocols import EncoderProtocol, SearchProtocol
from search_parts import save_checkpoint, save_method, write_clip
from tiny_transformers import XCLIP, save_tiny_xclip

import tvr_lightning
from tvr_lightning.api.mteb import EmbeddingModel, PairwiseModel
from tvr_lightning.encoders import Frozen, MTEBEncoder, TinyClipEncoder, TinyWav2Vec2Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.methods import GAID, CLIP4Clip, XPool

# Dependencies of MTEB warn about each other when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SMALL = {"width": 64, "text_layers": 1, "vision_layers": 1, "image_size": 32}
TEXTS = ["a red star moves left", "a small dog", "a person sings", "two cars in the rain"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tvr_lightning.load(save_method(XPool, tmp_path_factory.mktemp("run") / "last.ckpt", SMALL, 2))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [write_clip(folder / f"{number}.mp4", number) for number in range(4)]


def as_bytes(clips):
    """Videos as MTEB's datasets store them."""
    return [{"path": clip.name, "bytes": clip.read_bytes()} for clip in clips]


def table(**columns):
    found = datasets.Dataset.from_dict(columns)
    media = {"video": datasets.Video(), "audio": datasets.Audio()}
    types = {name: media.get(name.rstrip("12"), kind) for name, kind in found.features.items()}
    return found.cast(datasets.Features(types))


def with_pairs(task, stored):
    """A task of MTEB with four pairs instead of its own data; all texts are candidates of a question."""
    ids = [str(i) for i in range(len(TEXTS))]
    content = {"t": ("text", TEXTS), "v": ("video", stored), "a": ("audio", stored)}
    sides = task.metadata.category.split("2")
    queries, corpus = (table(id=ids, **dict(content[kind] for kind in side)) for side in sides)
    ranked = dict.fromkeys(ids, ids) if task.metadata.type == "VideoCentricQA" else None
    pairs = {name: {name: 1} for name in ids}
    rows = RetrievalSplitData(corpus=corpus, queries=queries, relevant_docs=pairs, top_ranked=ranked)
    task.dataset = {"default": dict.fromkeys(task.metadata.eval_splits, rows)}
    task.load_data, task.data_loaded = lambda **_: None, True
    return task


def task_of(category):
    """MSVD's task of MTEB with other sides."""
    task = mteb.get_task("MSVDT2VRetrieval")
    modalities = [name for name in ("text", "video", "audio") if name[0] in category]
    task.metadata = task.metadata.model_copy(update={"category": category, "modalities": modalities})
    return task


def ndcg(scores):
    """NDCG@10 of scores (4, 4) of matching pairs."""
    rank = (scores > scores.diagonal()[:, None]).sum(1) + 1
    return pytest.approx((1 / torch.log2(rank + 1.0)).mean().item(), abs=1e-4)


@pytest.mark.parametrize("category", ["t2v", "v2t"])
def test_mteb_ranks_by_the_scores_of_the_method(category, model, clips):
    wrapped = PairwiseModel(model)
    assert isinstance(wrapped, SearchProtocol)
    result = mteb.evaluate(wrapped, with_pairs(task_of(category), as_bytes(clips)), cache=None, show_progress_bar=False)
    (found,) = result.task_results[0].scores["test"]
    scores = model.score(TEXTS, clips)
    assert found["ndcg_at_10"] == ndcg(scores if category == "t2v" else scores.T)


def test_mteb_ranks_the_embeddings_by_cosine(model, clips):
    wrapped = EmbeddingModel(model)
    assert isinstance(wrapped, EncoderProtocol)
    assert not isinstance(wrapped, SearchProtocol)
    tiny = with_pairs(task_of("t2v"), list(map(str, clips)))
    result = mteb.evaluate(wrapped, tiny, cache=None, show_progress_bar=False)
    (found,) = result.task_results[0].scores["test"]
    scorer = model.scorer
    text, video = scorer.text_vectors(model.encode_text(TEXTS)), scorer.video_vectors(model.encode_video(clips))
    assert found["ndcg_at_10"] == ndcg(text @ video.T)
    torch.testing.assert_close(wrapped.similarity_pairwise(text, video), wrapped.similarity(text, video).diagonal())


def test_only_candidates_are_ranked_and_other_modalities_are_refused(model, clips):
    tiny = with_pairs(task_of("t2v"), list(map(str, clips)))
    split = tiny.dataset["default"]["test"]
    wrapped = PairwiseModel(model)
    with pytest.raises(UserError, match="Nothing is indexed"):
        wrapped.search(split["queries"], task_metadata=tiny.metadata, top_k=2)
    wrapped.index(split["corpus"], task_metadata=tiny.metadata)
    found = wrapped.search(split["queries"], task_metadata=tiny.metadata, top_k=2, top_ranked={"0": ["3", "1", "2"]})
    assert len(found["0"]) == 2
    assert "0" not in found["0"]
    assert found["1"] == {}
    heard = split["corpus"].add_column("audio", ["a.wav"] * len(clips))
    wrapped.index(heard, task_metadata=tiny.metadata)
    expected = wrapped.search(split["queries"], task_metadata=tiny.metadata, top_k=4)
    with pytest.warns(UserWarning, match="MSVDT2VRetrieval: xpool does not use the audio"):
        wrapped.index(heard, task_metadata=task_of("t2va").metadata)
    assert wrapped.search(split["queries"], task_metadata=tiny.metadata, top_k=4) == expected
    with pytest.raises(UserError, match="MSVDT2VRetrieval has audio on one side"):
        wrapped.index(heard, task_metadata=task_of("t2a").metadata)


def test_titles_of_a_corpus_count(model, clips):
    tiny, wrapped = with_pairs(task_of("v2t"), as_bytes(clips)), PairwiseModel(model)
    titled = table(id=list("0123"), title=["red", "a pet", None, "wet"], text=TEXTS)
    wrapped.index(titled, task_metadata=tiny.metadata)
    found = wrapped.search(tiny.dataset["default"]["test"]["queries"], task_metadata=tiny.metadata, top_k=4)
    sentences = [f"red {TEXTS[0]}", f"a pet {TEXTS[1]}", TEXTS[2], f"wet {TEXTS[3]}"]
    given = torch.tensor([[found[video][text] for video in "0123"] for text in "0123"])
    torch.testing.assert_close(given, model.score(sentences, clips))
    assert not torch.allclose(given, model.score(TEXTS, clips))


def labeled_rows(task, stored):
    """Rows of a task of classes, clusters, or pairs: the four videos three times, with alternating labels."""
    pair = task.metadata.type == "VideoPairClassification"
    columns = [task.input1_column_name, task.input2_column_name] if pair else [task.input_column_name]
    videos = {column: (stored if column != "video2" else stored[::-1]) * 3 for column in columns}
    rows = table(**videos, **{task.label_column_name: [0, 1, 0, 1] * 3})
    return rows if pair else rows.cast_column(task.label_column_name, datasets.ClassLabel(names=["walk", "swim"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # tasks with newer versions, and classes without predictions
def test_the_other_tasks_of_mveb_run_on_replaced_videos(model, clips):
    wrapped, kinds = EmbeddingModel(model), set()
    for tiny in mteb.get_benchmark("MVEB(text, video, v1)").tasks:
        if "Retrieval" in tiny.metadata.type or tiny.metadata.type == "VideoCentricQA":
            continue
        kinds.add(tiny.metadata.type)
        rows = labeled_rows(tiny, as_bytes(clips))
        tiny.dataset = datasets.DatasetDict(dict.fromkeys({"train", *tiny.metadata.eval_splits}, rows))
        tiny.load_data, tiny.data_loaded = lambda **_: None, True
        (result,) = mteb.evaluate(wrapped, tiny, cache=None, show_progress_bar=False).task_results
        assert 0 <= result.get_score() <= 1
    assert len(kinds) > 2


def test_texts_and_videos_of_one_side_are_added(model, clips):
    wrapped, pairwise = EmbeddingModel(model), PairwiseModel(model)
    both = table(id=list("0123"), text=TEXTS, video=list(map(str, clips)))
    scorer = model.scorer
    text, video = scorer.text_vectors(model.encode_text(TEXTS)), scorer.video_vectors(model.encode_video(clips))
    loader = torch.utils.data.DataLoader(both, collate_fn=list)
    found = wrapped.encode(loader, task_metadata=task_of("vt2t").metadata, prompt_type="query")
    torch.testing.assert_close(found, torch.nn.functional.normalize(text + video, dim=-1))
    assert wrapped.mteb_model_meta.experiment_kwargs == {"audio": "unused", "text_and_video": "sum"}
    with pytest.raises(UserError, match="has text and video on one side, but a method scores texts against videos"):
        pairwise.index(both, task_metadata=task_of("t2vt").metadata)


@pytest.fixture(scope="module")
def listening(tmp_path_factory):
    """A method with audio."""
    torch.manual_seed(5)
    plain = {"frames": 2, "words": 12}
    module = GAID(TinyClipEncoder(**SMALL), audio_encoder=TinyWav2Vec2Encoder(), **plain)
    audio = {"class_path": "tvr_lightning.encoders.TinyWav2Vec2Encoder", "init_args": {}}
    path = tmp_path_factory.mktemp("audio") / "last.ckpt"
    return tvr_lightning.load(save_checkpoint(module, SMALL, {**plain, "audio_encoder": audio}, path))


@pytest.fixture(scope="module")
def sounding(tmp_path_factory):
    """Clips with audio."""
    folder = tmp_path_factory.mktemp("sounding")
    clips = [folder / f"{number}.mkv" for number in range(4)]
    for number, clip in enumerate(clips):
        sound_files.write_clip(clip, sound_files.tone(2.0, frequency=300.0 * (number + 1)), gray=60 * number)
    return clips


@pytest.fixture(scope="module")
def xclip(tmp_path_factory):
    """A model of MTEB as encoder."""
    folder = tmp_path_factory.mktemp("xclip")
    save_tiny_xclip(folder / "model", TEXTS)
    options = {"model": str(folder / "model"), "wrapper": XCLIP}
    named = {"class_path": "tvr_lightning.encoders.MTEBEncoder", "init_args": options}
    plain, frozen = {"frames": 8, "words": 12}, {"class_path": "tvr_lightning.encoders.Frozen"}
    module = CLIP4Clip(MTEBEncoder(**options), tuning=Frozen(), **plain)
    checkpoint = save_checkpoint(module, named, plain | {"tuning": frozen}, folder / "last.ckpt")
    return tvr_lightning.load(checkpoint, trust=["mteb"])


MIXED = [
    "AVMemeExamAT2VRetrieval", "VALOR32KT2VARetrieval", "AudioCapsAVVA2TRetrieval", "MSVDT2VRetrieval",
    "EgoSchemaVideoCentricQA",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # audio that is not used
@pytest.mark.parametrize("kind", ["model", "xclip", "listening"])
def test_tasks_of_mveb_rank_by_what_the_model_uses_of_each_side(kind, request, sounding):
    found = request.getfixturevalue(kind)
    wrapped = (PairwiseModel if kind == "listening" else EmbeddingModel)(found)
    for tiny in mteb.get_tasks(tasks=MIXED):
        metadata, answers = tiny.metadata, tiny.metadata.type == "VideoCentricQA"
        with_pairs(tiny, as_bytes(sounding))
        if answers and kind == "listening":
            with pytest.raises(UserError, match="has text and video on one side"):
                mteb.evaluate(wrapped, tiny, cache=None, show_progress_bar=False)
            continue
        (result,) = mteb.evaluate(wrapped, tiny, cache=None, show_progress_bar=False).task_results
        text, video = found.encode_text(TEXTS), found.encode_video(sounding)
        if kind == "listening":
            scores = found.score(text, video)
        else:
            text, video = found.scorer.text_vectors(text), found.scorer.video_vectors(video)
            scores = text @ (torch.nn.functional.normalize(text + video, dim=-1) if answers else video).T
        (measured,) = result.scores[metadata.eval_splits[0]]
        assert measured["ndcg_at_10"] == ndcg(scores if "2v" in metadata.category else scores.T)


def test_methods_with_audio_use_the_audio_column(listening, tmp_path):
    paths = [tmp_path / f"{number}.mkv" for number in range(3)]
    sounds = [tmp_path / f"sound{number}.mkv" for number in range(3)]
    for number, (path, sound) in enumerate(zip(paths, sounds, strict=True)):
        sound_files.write_clip(path, None)
        sound_files.write_clip(sound, sound_files.tone(2.0, frequency=300.0 * (number + 1)))
    wrapped = PairwiseModel(listening)
    assert wrapped.mteb_model_meta.modalities == ["text", "video", "audio"]
    corpus = table(id=list("012"), video=as_bytes(paths), audio=as_bytes(sounds))
    queries = table(id=["0"], text=TEXTS[:1])

    def found(metadata):
        wrapped.index(corpus, task_metadata=metadata)
        scores = wrapped.search(queries, task_metadata=metadata, top_k=3)["0"]
        return torch.tensor([scores[name] for name in "012"])

    heard = found(task_of("t2va").metadata)
    expected = listening.scorer.score(listening.encode_text(TEXTS[:1]), listening.encode_video(paths, sounds))[0]
    torch.testing.assert_close(heard, expected)
    assert (heard - found(task_of("t2v").metadata)).abs().min() > 1e-6
    words, metadata = queries.add_column("audio", ["a.wav"]), task_of("at2v").metadata
    with pytest.warns(UserWarning, match="does not use the audio"):
        wrapped.search(words, task_metadata=metadata, top_k=1)


def test_mteb_runs_the_documented_tasks_of_mveb(model):
    from mteb.evaluate import _check_model_modalities

    page = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| \w+ \| (yes|without audio|no) \|", page, re.MULTILINE))
    meta, found = EmbeddingModel(model).mteb_model_meta, {}
    for each in mteb.get_benchmark("MVEB(v1)").tasks:
        try:
            _check_model_modalities(meta, each)
            found[each.metadata.name] = "without audio" if "audio" in each.metadata.modalities else "yes"
        except ValueError:
            found[each.metadata.name] = "no"
    assert listed == found
    assert sorted(found.values()).count("no") == 13
