"""Search: two stages, examples, filters, normalization, relevance, and audio."""

import dataclasses
import shutil
import sys
from contextlib import closing
from pathlib import Path, PurePosixPath

import av
import pytest
import sound_files
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search_parts import TINY, by_size, find, find_file, save_checkpoint, write_clip

from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder, TinyWav2Vec2Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import VideoFeatures
from tvr_lightning.methods import GAID
from tvr_lightning.search.engine import Searcher, best_moments
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.files import VideoFile, relative
from tvr_lightning.search.indexing import index
from tvr_lightning.search.relevance import BACKGROUND, GOOD, Scale, judge
from tvr_lightning.search.results import Moment
from tvr_lightning.search.scorer import ScorerSource
from tvr_lightning.search.table import IndexTable, encoded_path


def scores(answer):
    return {result.id: result.score for result in answer.results}


@pytest.mark.parametrize("name", ["gare", "clip4clip"])
def test_results_are_ranked_by_the_score_of_the_method(searcher, name):
    found = find(searcher, "a red square", rerank=name)
    scorer, rows = searcher.scorers[name], searcher.table.videos()
    spans = [searcher.table.spans(row.id)[0].key for row in rows]
    videos = VideoFeatures.cat([searcher.table.features([span], name)[span][0] for span in spans])
    expected = scorer.score(scorer.encode_texts(["a red square"]), videos)[0]
    expected = dict(zip([row.id for row in rows], expected.tolist(), strict=True))
    assert scores(found) == pytest.approx(expected, abs=1e-5)
    assert [r.score for r in found.results] == sorted((r.score for r in found.results), reverse=True)
    assert [r.rank for r in found.results] == list(range(1, 9))


def test_the_second_stage_scores_only_the_candidates(searcher):
    first = find(searcher, "a red square", rerank="none").results
    assert [r.cosine for r in first] == sorted((r.cosine for r in first), reverse=True)
    few = find(searcher, "a red square", top=2, candidates=3)
    assert few.candidates == 3
    assert {r.id for r in few.results} <= {r.id for r in first[:3]}
    with pytest.raises(SearchError, match="no scorer 'tcmgc', only gare, clip4clip and none"):
        find(searcher, "a", rerank="tcmgc")


def test_moments_are_frames_with_their_times(searcher):
    for result in find(searcher, "something blue", top=3).results:
        times = [moment.time for moment in result.moments]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] < result.duration
        assert result.best[0].similarity == max(moment.similarity for moment in result.moments)
    moments = [Moment(0.0, 0.5), Moment(0.5, 0.9), Moment(1.0, 0.8), Moment(3.0, 0.1), Moment(9.0, 0.2)]
    assert [moment.time for moment in best_moments(moments)] == [0.5, 9.0, 3.0], "at least a second apart"
    assert [moment.time for moment in best_moments(moments[:2])] == [0.5, 0.0]


def test_a_folder_is_relative_to_the_indexed_one(searcher, gallery):
    found = {r.path for r in find(searcher, "a", folder="below").results}
    assert found == {str(gallery / "below" / f"clip{number}.mp4") for number in (6, 7)}
    for folder, count in ((".", 8), ("below/", 2), ("belo", 0)):
        assert len(find(searcher, "a", folder=folder).results) == count
    for folder in ("..", "below/../below", "/"):
        with pytest.raises(SearchError, match="must be a path inside an indexed folder"):
            find(searcher, "a", folder=folder)
    rows, count = searcher.table.listed(None, 3, 2)
    assert count == 8
    assert [row.path.name for row in rows] == ["clip5.mp4", "clip4.mp4", "clip3.mp4"], "the newest first"
    assert searcher.folders() == [{"folder": ".", "count": 6}, {"folder": "below", "count": 2}]


def new_table(folder, *roots):
    """A table of these indexed paths without features."""
    table = IndexTable(folder, create=True)
    table.set_fact("scorers", [])
    table.set_fact("roots", list(map(str, roots)))
    return table


def rows_of(path, *vectors):
    """A file, and its rows in the table: a one-second segment for each vector."""
    file = VideoFile(Path(path), 1, 1)
    state = {"id": file.id, "path": encoded_path(file.path), "modified": 1, "bytes": 1, "duration": float(len(vectors))}
    return file, [
        state | {"place": i, "key": file.span_key(i), "start": i, "end": i + 1, "vector": vector.numpy()}
        for i, vector in enumerate(vectors)
    ]


# Letters whose cases differ, digits, and characters with a meaning in SQL or in paths.
NAMES = st.text(st.sampled_from("aAbB_-. %*\\'\"\u00e9\u0301\u4e2d"), min_size=1, max_size=3).filter(
    lambda name: name not in (".", "..")
)
FOLDERS = st.lists(NAMES, max_size=3).map("/".join)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(folders=st.lists(FOLDERS, max_size=6), folder=FOLDERS)
def test_the_folder_filter_in_sql_selects_what_python_would(tmp_path_factory, folders, folder):
    roots = [Path("/videos"), Path("/more")]
    table = new_table(tmp_path_factory.mktemp("index"), *roots)
    paths = [roots[number % 2] / name / f"{number}.mp4" for number, name in enumerate(folders)]
    found = [rows_of(path, torch.eye(2)[0], torch.ones(2)) for path in [*paths, "/videos.mp4"]]
    table.commit([row for _, rows in found for row in rows])
    for wanted in {folder, *folders}:
        chosen = [file for file, _ in found if any(root / wanted in file.path.parents for root in roots)]
        if not PurePosixPath(wanted).parts:
            chosen = [file for file, _ in found]
        expected = sorted(span.key for file in chosen for span in table.spans(file.id))
        assert sorted(span.key for span in table.nearest(torch.ones(2), 100, wanted)) == expected
        assert table.listed(wanted, 100, 0)[1] == len(chosen)


def test_a_single_indexed_file_is_listed_in_the_top_folder(tmp_path):
    table = new_table(tmp_path / "index", "/videos/single.mp4", "/more")
    for path in ("/videos/single.mp4", "/more/trips/other.mp4"):
        table.commit(rows_of(path, torch.ones(2))[1])
    folder = relative(Path("/videos/single.mp4"), table.roots).rpartition("/")[0] or "."
    listed, count = table.listed(folder, 10, 0)
    assert count == 2
    assert {row.path.name for row in listed} == {"single.mp4", "other.mp4"}
    assert [row.path.name for row in table.listed("trips", 10, 0)[0]] == ["other.mp4"]


def test_sinkhorn_adds_one_bias_per_video_and_prevents_hubs(searcher):
    plain = scores(find(searcher, "a red square"))
    biased = find(searcher, "a red square", normalize="sinkhorn").results
    for result in biased:
        assert result.score == pytest.approx(plain[result.id] + result.bias, abs=1e-12)  # in double precision
    other = {r.id: r.bias for r in find(searcher, "a cat", normalize="sinkhorn").results}
    assert other == {r.id: r.bias for r in biased}
    assert len(set(other.values())) > 1
    scorer, bank = searcher.scorers["gare"], searcher.table.fact("bank")
    ((keys, vectors),) = searcher.table.vectors()
    cosines = scorer.text_vectors(scorer.encode_texts(bank)) @ vectors.T
    biases = torch.tensor([searcher._compute_biases(0)[key] for key in keys])
    spread = [(x / scorer.module.score_temperature()).softmax(1).sum(0).std() for x in (cosines, cosines + biases)]
    assert spread[1] < spread[0]


def test_a_video_and_an_image_of_its_frame_find_the_video(searcher, gallery, tmp_path):
    own = find_file(searcher, gallery / "clip5.mp4").results
    assert own[0].path.endswith("clip5.mp4")
    assert own[0].score == pytest.approx(1.0, abs=1e-4)
    assert [r.id for r in find(searcher, like=own[0].id).results] == [r.id for r in own[1:]], "others by its ID"
    assert len(own) == 8
    with av.open(str(gallery / "clip5.mp4")) as container:
        next(container.decode(video=0)).to_image().save(tmp_path / "frame.png")
    example = searcher.add_example(tmp_path / "frame.png", "image")
    assert find(searcher, like=example).results[0].id == own[0].id


@pytest.mark.parametrize("rerank", ["gare", "clip4clip", "none"])
def test_an_example_and_text_count_equally(searcher, gallery, rerank):
    example = searcher.add_example(gallery / "clip4.mp4", name="mine")
    alone = find(searcher, like=example)
    assert (alone.query, alone.rerank) == ("mine", "frames")
    words = scores(find(searcher, "a red square", rerank=rerank))
    both = find(searcher, "a red square", rerank=rerank, like=example)
    assert both.query == "a red square, mine"
    assert scores(both) == pytest.approx({v: (words[v] + scores(alone)[v]) / 2 for v in words}, abs=1e-5)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(UserError, match=r"the index needs lancedb: pip install 'tvr-lightning\[search\]'"):
        IndexTable(tmp_path)


def test_the_relevance_scale_is_fitted_to_unrelated_queries_and_robust_to_a_few_matches():
    assert len(set(BACKGROUND)) == 100
    torch.manual_seed(0)
    background = torch.nn.functional.normalize(torch.randn(100, 64), dim=1)
    videos = torch.nn.functional.normalize(torch.randn(500, 64), dim=1)
    plain = Scale.fit(background, [videos[:300], videos[300:]])
    best = (background @ videos.T).amax(1)
    assert plain.middle == pytest.approx(float(best.median()))
    assert plain.spread == pytest.approx(float(best.std()), rel=0.4)
    shown = Scale.fit(background, [torch.cat([videos, background[:20]])])
    assert shown.middle - plain.middle < plain.spread
    assert shown.spread < 1.5 * plain.spread
    assert plain.relevance(1.0) > 0.999
    assert plain.relevance(plain.middle) == pytest.approx(0.5)
    assert Scale.fit(background, []) is None


def test_text_results_have_a_relevance_and_can_be_filtered_by_it(searcher):
    known = searcher.table.fact("relevance")
    scale = Scale(known["middle"], known["spread"])
    answer = find(searcher, "a red square")
    assert [r.relevance for r in answer.results] == [scale.relevance(r.cosine) for r in answer.results]
    assert answer.weak == all(r.relevance < GOOD for r in answer.results)
    assert find(searcher, like=answer.results[0].id).results[0].relevance is None
    middle = sorted(r.relevance for r in answer.results)[4]
    fewer = find(searcher, "a red square", min_relevance=middle)
    assert {r.id for r in fewer.results} == {r.id for r in answer.results if r.relevance >= middle}
    answer.results.sort(key=lambda result: result.relevance)
    judge(answer, scale, 1.0, middle)
    assert [r.rank for r in answer.results] == [1, 2, 3, 4], "renumbered"


def test_a_note_reports_that_nothing_matches(small_index, searcher, capsys, monkeypatch):
    monkeypatch.setattr(Scale, "relevance", lambda self, cosine: 0.2)
    assert find(searcher, "a cat").notes == ["nothing here matches well; these are the closest"]
    none = find(searcher, "a cat", min_relevance=0.5)
    assert (none.weak, none.results, none.notes) == (True, [], ["nothing here matches well"])
    assert main(["search", "a cat", "--index", str(small_index), "--min_relevance", "0.5"]) == 0
    assert capsys.readouterr().out == "note: nothing here matches well\n"
    accepted = find(searcher, "a cat", min_relevance=0.1)
    assert (accepted.weak, len(accepted.results), accepted.notes) == (False, 8, []), "good enough for the user"


def test_the_relevance_scale_is_updated_with_the_index(small_index, gallery, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # other tests use the same index without the new video

    def update(*videos):
        index([gallery, *videos], out, progress=False)
        with closing(IndexTable(out)) as table:
            return table.fact("relevance")

    out = shutil.copytree(small_index, tmp_path / "index")
    before = update()
    assert before["of"][0] == 8
    after = update(write_clip(tmp_path / "one.mp4", 40))
    assert after["of"][0] == 9
    assert after["middle"] >= before["middle"], "more videos contain better matches"
    assert update(tmp_path / "one.mp4") == after


def test_gaid_scores_use_the_audio_of_videos_that_have_some(tmp_path):
    (tmp_path / "videos").mkdir()
    for name, frequency in (("low", 200.0), ("middle", 800.0), ("high", 3000.0), ("mute", None)):
        tone = frequency and sound_files.tone(2.0, frequency=frequency)
        sound_files.write_clip(tmp_path / "videos" / f"{name}.mkv", tone)
    torch.manual_seed(0)
    plain = {"words": 12, "frames": 4}
    method = GAID(TinyClipEncoder(**TINY), audio_encoder=TinyWav2Vec2Encoder(), **plain)
    audio = {"class_path": "tvr_lightning.encoders.TinyWav2Vec2Encoder", "init_args": {}}
    checkpoint = save_checkpoint(method, TINY, {**plain, "audio_encoder": audio}, tmp_path / "gaid.ckpt")
    report = index([tmp_path / "videos"], tmp_path / "index", [ScorerSource(str(checkpoint))], progress=False)
    assert report.added == 4, report.lines()
    changes = {}
    with Searcher(tmp_path / "index") as searcher:
        scorer = searcher.scorers["gaid"]
        text = scorer.encode_texts(["a man plays the piano"])
        for result in find(searcher, "a man plays the piano").results:
            key = searcher.table.spans(result.id)[0].key
            video, _ = searcher.table.features([key], "gaid")[key]
            silent = dataclasses.replace(video, audio=video.frames)  # audio equal to the frames changes nothing
            changes[result.path.rpartition("/")[2]] = result.score - float(scorer.score(text, silent))
    assert changes.pop("mute.mkv") == pytest.approx(0.0, abs=1e-6)
    assert all(abs(change) > 1e-6 for change in changes.values())
    assert len({round(change, 7) for change in changes.values()}) == 3


def test_a_reranker_of_files_ranks_only_the_candidates(small_index):
    name = "search_parts.by_size"
    with Searcher(small_index, rerank=name) as own:
        found = find(own, "a red square", candidates=3, top=3)
        assert (found.rerank, found.candidates) == (name, 3)
        nearest = find(own, "a red square", rerank="none", top=3).results
        assert {r.id for r in found.results} == {r.id for r in nearest}
        assert [r.score for r in found.results] == sorted((r.score for r in found.results), reverse=True)
        for result in found.results:
            assert result.score == pytest.approx(by_size("a red square", Path(result.path)), abs=1e-6)
    with Searcher(small_index) as without, pytest.raises(SearchError, match="no scorer"):
        find(without, "a red square", rerank=name)
