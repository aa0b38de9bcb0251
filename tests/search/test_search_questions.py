"""Queries by text, by an example, or by both; the library and its folders."""

import json

import pytest
from PIL import Image
from search_parts import find

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher, best_moments
from tvr_lightning.search.query import SearchQuery
from tvr_lightning.search.results import Moment


@pytest.fixture(scope="module")
def searcher(indexed):
    with Searcher(indexed) as made:
        yield made


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "red.png"
    Image.new("RGB", (90, 60), "red").save(path)
    return path


def scores(answer):
    return {result.id: result.score for result in answer.results}


@pytest.mark.parametrize("rerank", ["gare", "clip4clip", "none"])
@pytest.mark.parametrize("kind", ["clip", "image"])
def test_an_example_and_text_count_equally(searcher, gallery, picture, rerank, kind):
    example = searcher.add_example(gallery / "clip4.mp4" if kind == "clip" else picture, kind, "an example")
    alone = find(searcher, like=example)
    assert (alone.query, alone.rerank) == ("an example", "frames")
    words = scores(find(searcher, "a red square", rerank=rerank))
    both = find(searcher, "a red square", rerank=rerank, like=example)
    assert both.query == "a red square, an example"
    assert scores(both) == pytest.approx({v: (words[v] + scores(alone)[v]) / 2 for v in words}, abs=1e-5)


def test_an_example_of_the_index_is_no_result_of_its_own(searcher):
    rows = searcher.catalog.videos()
    found = find(searcher, like=rows[0].id)
    assert {result.id for result in found.results} == {row.id for row in rows[1:]}


def test_a_picture_of_a_frame_finds_its_video(searcher, gallery, tmp_path):
    import av

    with av.open(str(gallery / "clip5.mp4")) as container:
        next(container.decode(video=0)).to_image().save(tmp_path / "frame.png")
    example = searcher.add_example(tmp_path / "frame.png", "image")
    assert find(searcher, like=example).results[0].path.endswith("clip5.mp4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": " \n"}, "The query is empty"),
        ({"query": "a", "top": 0}, "top"),
        ({"query": "a", "normalize": "dual"}, "normalize"),
        ({"query": "a", "min_relevance": 2.0}, "min_relevance"),
        ({"like": "0" * 16, "min_relevance": 0.5}, "apply only to text queries"),
        ({"like": "0" * 16, "rerank": "gare"}, "apply only to text queries"),
        ({"like": "0" * 16, "normalize": "sinkhorn"}, "apply only to text queries"),
    ],
)
def test_invalid_queries(options, message):
    with pytest.raises(ValueError, match=message):
        SearchQuery(**options)


def test_the_command_line_takes_an_example_alone_and_with_text(indexed, gallery, picture, capsys):
    common = ["--index", str(indexed), "--device", "cpu", "--json"]
    for option, path in (("--video", gallery / "clip1.mp4"), ("--image", picture)):
        assert main(["search", option, str(path), *common]) == 0
        assert json.loads(capsys.readouterr().out)["query"] == path.name
        assert main(["search", "a red square", option, str(path), *common]) == 0
        assert json.loads(capsys.readouterr().out)["query"] == f"a red square, {path.name}"
    assert main(["search", "--video", str(gallery / "clip1.mp4"), "--image", str(picture), *common]) == 2
    assert "either --video or --image" in capsys.readouterr().err
    assert main(["search", *["--video", str(gallery / "clip1.mp4")] * 2, *common]) == 2
    assert "--video is given more than once" in capsys.readouterr().err


def test_the_library_is_listed_and_counted(searcher):
    rows, count = searcher.catalog.listed(None, 3, 2)
    assert (len(rows), count) == (3, 8)
    assert searcher.folders() == [{"folder": ".", "count": 6}, {"folder": "below", "count": 2}]
    assert searcher.catalog.listed("below", 3, 0)[1] == 2


def test_best_moments_are_of_different_seconds():
    moments = [Moment(0.0, 0.5), Moment(0.5, 0.9), Moment(1.0, 0.8), Moment(3.0, 0.1), Moment(9.0, 0.2)]
    assert [moment.time for moment in best_moments(moments)] == [0.5, 9.0, 3.0]
    assert [moment.time for moment in best_moments(moments[:2])] == [0.5, 0.0]
