"""What can be asked: words, examples, both, and away from others; the library and its facets."""

import json

import pytest
from PIL import Image

from tvr_lightning.cli import main
from tvr_lightning.search import Searcher, SearchError, engine
from tvr_lightning.search.ranking import WITHOUT, Example, best_of
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
def test_what_is_not_wanted_takes_its_part_away(searcher, rerank):
    plain, other = (scores(searcher.search(words, rerank=rerank)) for words in ("a red square", "blue"))
    found = scores(searcher.search("a red square", rerank=rerank, without="blue"))
    assert found == pytest.approx({video: plain[video] - WITHOUT * other[video] for video in plain}, abs=1e-5)


def test_examples_and_words_count_alike(searcher, gallery, picture):
    clip = Example("clip4.mp4", searcher.read_example(gallery / "clip4.mp4"))
    still = Example("red.png", searcher.read_picture_example(picture))
    by_clip, by_still = scores(searcher.search(like=[clip])), scores(searcher.search(like=[still]))
    words = scores(searcher.search("a red square"))
    both = searcher.search(like=[clip, still])
    assert scores(both) == pytest.approx({v: (by_clip[v] + by_still[v]) / 2 for v in by_clip}, abs=1e-5)
    assert (both.query, both.rerank) == ("clip4.mp4, red.png", "frames")
    three = scores(searcher.search("a red square", like=[clip, still]))
    assert three == pytest.approx({v: (words[v] + by_clip[v] + by_still[v]) / 3 for v in words}, abs=1e-5)
    away = scores(searcher.search("a red square", unlike=[clip]))
    assert away == pytest.approx({v: words[v] - WITHOUT * by_clip[v] for v in words}, abs=1e-5)


def test_an_example_of_the_index_is_no_result_of_its_own(searcher):
    rows = searcher.catalog.videos()
    found = searcher.search(like=[searcher.example(rows[0].id), searcher.example(rows[1].id)])
    assert {result.id for result in found.results} == {row.id for row in rows[2:]}


def test_a_picture_of_a_frame_finds_its_video(searcher, gallery, tmp_path):
    import av

    with av.open(str(gallery / "clip5.mp4")) as container:
        next(container.decode(video=0)).to_image().save(tmp_path / "frame.png")
    example = searcher.read_picture_example(tmp_path / "frame.png")
    assert searcher.search_example(example, "frame").results[0].path.endswith("clip5.mp4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "empty"),
        ({"without": "blue"}, "empty"),
        ({"threshold": 0.5, "like": "picture"}, "threshold applies only to text"),
    ],
)
def test_what_cannot_be_asked(searcher, picture, options, said):
    if "like" in options:
        options = {**options, "like": [Example("red", searcher.read_picture_example(picture))]}
    with pytest.raises(SearchError, match=said):
        searcher.search(**options)


def test_the_command_line_takes_pictures_clips_and_what_is_not_wanted(indexed, gallery, picture, capsys):
    words = ["--video", str(gallery / "clip1.mp4"), "--video", str(gallery / "clip2.mp4"), "--image", str(picture)]
    common = ["--index", str(indexed), "--device", "cpu", "--json"]
    assert main(["search", *words, *common]) == 0
    assert json.loads(capsys.readouterr().out)["query"] == "clip1.mp4, clip2.mp4, red.png"
    assert main(["search", "a red square", "--without", "blue", *words, *common]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["query"].startswith("a red square, clip1.mp4")


def test_a_filter_that_admits_much_chooses_as_one_that_admits_little(searcher, monkeypatch):
    for folder in (".", "below", "nowhere"):
        few = searcher.search("a red square", top=2, candidates=2, folder=folder)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "MOST_KEYS", 0)
            much = searcher.search("a red square", top=2, candidates=2, folder=folder)
        assert [r.id for r in much.results] == [r.id for r in few.results]


def test_the_library_is_listed_and_counted(searcher):
    rows, count = searcher.catalog.listed(None, 3, 2)
    assert (len(rows), count) == (3, 8)
    assert searcher.folders() == [{"folder": ".", "count": 6}, {"folder": "below", "count": 2}]
    assert searcher.catalog.listed("below", 3, 0)[1] == 2
    assert searcher.example_queries()[0] == "a red square"
    times = searcher.catalog.picture_times(rows[0].id, 2)
    assert times == [0.0, 2.0]


def test_best_moments_are_of_different_seconds():
    moments = [Moment(0.0, 0.5), Moment(0.5, 0.9), Moment(1.0, 0.8), Moment(3.0, 0.1), Moment(9.0, 0.2)]
    assert [moment.time for moment in best_of(moments)] == [0.5, 9.0, 3.0]
    assert [moment.time for moment in best_of(moments[:2])] == [0.5, 0.0]
