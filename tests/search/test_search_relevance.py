"""Relevance of results, on a scale fitted to the index, and a note if nothing matches well."""

import json

import pytest
import torch
from search_parts import find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.relevance import BACKGROUND, GOOD, Scale


def test_the_background_is_a_hundred_different_sentences():
    assert len(set(BACKGROUND)) == 100


def test_the_scale_is_where_most_unrelated_queries_end_and_few_that_fit_do_not_move_it():
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


@pytest.fixture
def searcher(indexed):
    with Searcher(indexed) as made:
        yield made


def test_every_result_of_words_says_how_relevant_it_is(searcher):
    known = searcher.catalog.fact("relevance")
    scale = Scale(known["middle"], known["spread"])
    answer = find(searcher, "a red square")
    assert [r.relevance for r in answer.results] == [scale.relevance(r.cosine) for r in answer.results]
    assert answer.weak == all(r.relevance < GOOD for r in answer.results)
    assert find(searcher, like=answer.results[0].id).results[0].relevance is None


def test_a_threshold_leaves_out_what_is_less_relevant(searcher):
    answer = find(searcher, "a red square")
    middle = sorted(r.relevance for r in answer.results)[4]
    fewer = find(searcher, "a red square", min_relevance=middle)
    assert {r.id for r in fewer.results} == {r.id for r in answer.results if r.relevance >= middle}
    assert [r.rank for r in fewer.results] == list(range(1, len(fewer.results) + 1))


def test_where_nothing_matches_it_is_said(indexed, searcher, capsys, monkeypatch):
    monkeypatch.setattr(Scale, "relevance", lambda self, cosine: 0.2)
    assert find(searcher, "a cat").notes == ["nothing here matches well; these are the closest"]
    none = find(searcher, "a cat", min_relevance=0.5)
    assert (none.weak, none.results, none.notes) == (True, [], ["nothing here matches well"])
    assert main(["search", "a cat", "--index", str(indexed), "--min_relevance", "0.5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "note: nothing here matches well\n"
    assert main(["search", "a cat", "--index", str(indexed), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["weak"] is True


def test_the_scale_follows_the_index(gallery, sources, tmp_path):
    write_clip(tmp_path / "videos" / "one.mp4", 1)
    index([tmp_path / "videos"], tmp_path / "index", sources[1:], progress=False)
    with Searcher(tmp_path / "index") as searcher:
        before = searcher.catalog.fact("relevance")
    index([], tmp_path / "index", progress=False)
    with Searcher(tmp_path / "index") as searcher:
        assert searcher.catalog.fact("relevance") == before
    index([gallery], tmp_path / "index", progress=False)
    with Searcher(tmp_path / "index") as searcher:
        after = searcher.catalog.fact("relevance")
        assert after["middle"] >= before["middle"], "more videos, better best matches"
        assert after["of"][0] == 9
