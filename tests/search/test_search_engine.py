"""Search: two stages, every store, filters, normalization, and the command line."""

import json

import pytest
import torch
from search_parts import find, find_file

from tvr_lightning.cli import main
from tvr_lightning.features import VideoFeatures
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index
from tvr_lightning.search.results import clock


@pytest.fixture(scope="module")
def searcher(indexed):
    with Searcher(indexed) as made:
        yield made


def exhaustive(searcher, query, scorer):
    judge = searcher.scorers[scorer]
    rows = searcher.catalog.videos()
    spans = [searcher.catalog.spans(row.id)[0].key for row in rows]
    videos = VideoFeatures.cat([searcher.catalog.features(span, scorer)[0] for span in spans])
    scores = judge.score(judge.encode_texts([query]), videos)[0]
    return {row.id: float(score) for row, score in zip(rows, scores, strict=True)}


@pytest.mark.parametrize("scorer", ["gare", "clip4clip"])
def test_results_are_ranked_by_the_methods_own_score(searcher, scorer):
    found = find(searcher, "a red square", rerank=scorer)
    expected = exhaustive(searcher, "a red square", scorer)
    assert {r.id: r.score for r in found.results} == pytest.approx(expected, abs=1e-5)
    assert [r.score for r in found.results] == sorted((r.score for r in found.results), reverse=True)
    assert [r.rank for r in found.results] == list(range(1, 9))


def test_the_second_stage_scores_the_candidates_alone(searcher):
    first = find(searcher, "a red square", rerank="none").results
    assert [r.cosine for r in first] == sorted((r.cosine for r in first), reverse=True)
    few = find(searcher, "a red square", top=2, candidates=3)
    assert few.candidates == 3
    assert {r.id for r in few.results} <= {r.id for r in first[:3]}


def test_moments_are_frames_with_their_times(searcher):
    for result in find(searcher, "something blue", top=3).results:
        times = [moment.time for moment in result.moments]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] < result.duration
        assert result.best[0].similarity == max(moment.similarity for moment in result.moments)


def test_a_folder_is_relative_to_the_indexed_one(searcher, gallery):
    found = {r.path for r in find(searcher, "a", folder="below").results}
    assert found == {str(gallery / "below" / f"clip{number}.mp4") for number in (6, 7)}
    assert len(find(searcher, "a", folder=".").results) == 8
    assert len(find(searcher, "a", folder="below/").results) == 2
    for folder in ("belo", "below/clip6.mp4", "nowhere"):
        assert find(searcher, "a", folder=folder).results == []
    for folder in (str(gallery), str(gallery / "below"), "..", "below/../below", "/"):
        with pytest.raises(SearchError, match="must be a path inside an indexed folder"):
            find(searcher, "a", folder=folder)


def test_sinkhorn_adds_one_bias_per_video(searcher):
    plain = {r.id: r for r in find(searcher, "a red square").results}
    biased = find(searcher, "a red square", normalize="sinkhorn").results
    for result in biased:
        assert result.score == pytest.approx(plain[result.id].score + result.bias, abs=1e-5)
    other = {r.id: r.bias for r in find(searcher, "a cat", normalize="sinkhorn").results}
    assert other == {r.id: r.bias for r in biased}
    assert len(set(other.values())) > 1


def test_sinkhorn_keeps_a_hub_from_crowding_the_results(searcher):
    scorer, bank = searcher.scorers["gare"], searcher.catalog.fact("bank")
    _, vectors = searcher.catalog.vectors()
    cosines = scorer.text_vectors(scorer.encode_texts(bank)) @ vectors.T
    biases = torch.tensor([searcher._compute_biases(0)[key] for key in searcher.catalog.vectors()[0]])
    spread = [(x / scorer.module.score_temperature()).softmax(1).sum(0).std() for x in (cosines, cosines + biases)]
    assert spread[1] < spread[0]


def test_video_to_video(searcher, gallery):
    own = find_file(searcher, gallery / "clip5.mp4").results
    assert own[0].path.endswith("clip5.mp4")
    assert own[0].score == pytest.approx(1.0, abs=1e-4)
    similar = find(searcher, like=own[0].id)
    assert [r.id for r in similar.results] == [r.id for r in own[1:]]


def test_an_unknown_scorer(searcher):
    with pytest.raises(SearchError, match="no scorer 'tcmgc', only gare, clip4clip and none"):
        find(searcher, "a", rerank="tcmgc")


@pytest.mark.parametrize("store", ["lancedb", "qdrant"])
def test_every_store_answers_alike(searcher, gallery, sources, tmp_path, store, request):
    name = store if store == "lancedb" else request.getfixturevalue(store)
    index([gallery], tmp_path / "index", sources, name, progress=False)
    with Searcher(tmp_path / "index") as other:
        for query in ("a red square", "a cat"):
            for folder in (None, "below"):
                found = [r.id for r in find(other, query, folder=folder).results]
                assert found == [r.id for r in find(searcher, query, folder=folder).results]
        keys, vectors = other.catalog.vectors()
        for row, values in enumerate(vectors @ vectors.T):
            best = values.topk(3)
            hits = other.vectors.nearest(vectors[row], 3)
            assert [key for key, _ in hits] == [keys[place] for place in best.indices.tolist()]
            assert [cosine for _, cosine in hits] == pytest.approx(best.values.tolist(), abs=1e-4)
        other.vectors.add(keys[:1], -vectors[:1])
        other.vectors.remove(keys[1:2])
        assert other.vectors.keys() == set(keys) - {keys[1]}
        assert other.vectors.nearest(-vectors[0], 1)[0][0] == keys[0], "a key that is there gets its new vector"


def test_an_absent_package_is_named(indexed, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lancedb", None)
    with pytest.raises(SearchError, match=r"needs the package lancedb.*tvr-lightning\[search\]"):
        Searcher(indexed)


def test_the_command_line(gallery, checkpoints, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "index")
    ckpts = [item for path in checkpoints.values() for item in ("--ckpt_path", str(path))]
    assert main(["index", str(gallery), "--out", out, *ckpts]) == 0
    assert "8 videos added" in capsys.readouterr().out
    assert main(["search", "a", "red", "square", "--index", out, "--top", "2", "--rerank", "clip4clip", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["query"], answer["rerank"], len(answer["results"])) == ("a red square", "clip4clip", 2)
    assert main(["search", "a red square", "--index", out, "--top", "2"]) == 0
    said = capsys.readouterr().out
    assert "best at 0:0" in said
    assert str(gallery) in said
    monkeypatch.chdir(gallery.parent)
    assert main(["search", "a red square", "--index", out, "--top", "2"]) == 0
    assert f"  {gallery.name}/" in capsys.readouterr().out, "from the working folder on"
    assert main(["search", "--video", str(gallery / "clip1.mp4"), "--index", out, "--top", "1"]) == 0
    assert "clip1.mp4" in capsys.readouterr().out
    assert main(["search", "--index", out]) == 2
    assert "No query is given" in capsys.readouterr().err
    assert main(["search", "a", "--index", str(tmp_path)]) == 1
    assert "contains no index" in capsys.readouterr().err
    assert main(["index", str(gallery), "--out", out, *ckpts, "--weights", "none"]) == 2
    assert "cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "shown"), [(0.04, "0:00.0"), (59.96, "1:00.0"), (3723.4, "1:02:03.4")])
def test_clock(seconds, shown):
    assert clock(seconds) == shown
