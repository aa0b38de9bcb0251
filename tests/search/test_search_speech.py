"""What is said: from a file, as Whisper hears it, and beside what is seen."""

import pytest
import torch
from search_parts import write_clip
from sound_files import tone
from sound_files import write_clip as write_sound

from tvr_lightning.cli import main
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.search import Filter, Searcher, SearchError, index
from tvr_lightning.search.ranking import fuse
from tvr_lightning.search.results import Said
from tvr_lightning.search.speech import Transcriber, match, read_transcripts

LINES = """video_id,start,end,text
clip3,1.0,2.0,The quick brown fox jumped over the fence
clip3,0.0,1.0,Welcome everybody
below/clip6.mp4,0.5,1.5,our tax return of last year
clip1.mp4,0,1,A fox in the garden
"""


@pytest.fixture
def transcripts(tmp_path):
    (tmp_path / "said.csv").write_text(LINES)
    return tmp_path / "said.csv"


@pytest.fixture
def spoken(gallery, sources, tmp_path, transcripts):
    index([gallery], tmp_path / "index", sources[1:], "exact", progress=False, transcripts=transcripts)
    return tmp_path / "index"


def names(answer):
    return [result.path.rpartition("/")[2] for result in answer.results]


def test_words_that_are_said_bring_their_video_up_and_say_why(spoken):
    with Searcher(spoken) as searcher:
        plain = names(searcher.search("nothing of the sort"))
        answer = searcher.search("tax returns of the year")
        assert names(answer)[0] == "clip6.mp4", "folded and stemmed"
        first = answer.results[0]
        assert first.said[0].text == "our tax return of last year"
        assert "said at 0:00.5: our tax return of last year" in first.why
        assert any(reason.startswith("seen at") for reason in first.why)
        assert not answer.weak
        ranks = {name: place for place, name in enumerate(plain, 1)}
        assert len(ranks) == 8
        others = [result for result in answer.results if not result.said]
        assert all(len(result.why) == 1 for result in others)
        both = searcher.search("a fox jumps over fences")
        assert [each.text for each in both.results[0].said] == ["The quick brown fox jumped over the fence"]
        assert names(searcher.search("tax return", only=Filter(path="clip3"))) == ["clip3.mp4"]
        assert not searcher.search("tax return", only=Filter(path="clip3")).results[0].said
        assert names(searcher.search("tax return", threshold=1.0)) == ["clip6.mp4"], "it is said, whatever is seen"
        assert names(searcher.search("tax return", top=1)) == ["clip6.mp4"]


def test_the_order_is_the_sum_of_reciprocal_ranks(spoken):
    with Searcher(spoken) as searcher:
        answer = searcher.search("fox")
        sight = {name: rank for rank, name in enumerate(names(searcher.search("foxes foxes", rerank="none")), 1)}
        assert set(names(answer)[:2]) == {"clip1.mp4", "clip3.mp4"}
        assert len(sight) == 8
    assert fuse({"a": 1, "b": 2}, {"b": 1}) == {"a": 1 / 61, "b": 1 / 62 + 1 / 61}


def test_changed_videos_lose_what_was_said_and_others_keep_it(gallery, sources, tmp_path, transcripts):
    import shutil

    videos = shutil.copytree(gallery, tmp_path / "videos")
    out = tmp_path / "index"
    index([videos], out, sources[1:], "exact", progress=False, transcripts=transcripts)
    write_clip(videos / "clip3.mp4", 30)
    (videos / "clip1.mp4").unlink()
    index([], out, progress=False)
    with Searcher(out) as searcher:
        assert len(searcher.catalog.heard()) == 1
        assert not any(result.said for result in searcher.search("fox").results)
        assert searcher.search("tax return").results[0].said


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("the of a", None),
        ("Fox!", '"fox"'),
        ("fox fence", '"fence" AND "fox"'),
        ('a "b" c d', '("b" AND "c") OR ("b" AND "d") OR ("c" AND "d")'),
    ],
)
def test_queries_become_full_text_queries(query, expected):
    assert match(query) == expected


@pytest.mark.parametrize("query", ['"', "fox AND", "NEAR(", "content:", "*", "^fox -", "né\u0301"])
def test_no_query_is_taken_for_syntax(spoken, query):
    with Searcher(spoken) as searcher:
        assert searcher.search(query).results


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("video_id,start,end\nclip3,0,1\n", "line 1: 'text'; expected video_id, start, end, text"),
        ("video_id,start,end,text\nclip3,2,1,a\n", "from 2 to 1 s"),
        ("video_id,start,end,text\nclip3,nan,1,a\n", "from nan to 1 s"),
        ("video_id,start,end,text\nother,0,1,a\n", "about none of the index's videos, but about other"),
    ],
)
def test_transcripts_that_cannot_be_used(gallery, sources, tmp_path, content, said):
    (tmp_path / "said.csv").write_text(content)
    with pytest.raises(SearchError, match=said):
        index([gallery], tmp_path / "index", sources[1:], "exact", progress=False, transcripts=tmp_path / "said.csv")


def test_json_lines_are_read_too(tmp_path):
    (tmp_path / "said.jsonl").write_text('{"video_id": "a", "start": 1, "end": 2, "text": " x  y "}\n')
    assert read_transcripts(tmp_path / "said.jsonl")["a"][0].text == "x y"
    with pytest.raises(SearchError, match="cannot be read as transcripts"):
        read_transcripts(tmp_path / "nowhere.jsonl")


def test_whisper_without_weights_is_said(gallery, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingWeightsError, match="Whisper base"):
        Transcriber("base")
    with pytest.raises(MissingWeightsError, match="no such file"):
        Transcriber("nowhere.pt")
    (tmp_path / "bad.pt").write_text("none")
    with pytest.raises(SearchError, match="cannot be read as Whisper's weights"):
        Transcriber(str(tmp_path / "bad.pt"))
    words = ["index", str(gallery), "--weights", "none", "--out", str(tmp_path / "index"), "--transcribe", "base"]
    assert main(words) == 1
    assert "Whisper base" in capsys.readouterr().err


def test_whisper_s_own_format_of_weights_is_loaded_and_hears(gallery, tmp_path):
    """A tiny Whisper with random weights, saved as openai-whisper's files are."""
    from whisper.model import ModelDimensions, Whisper

    dims = ModelDimensions(80, 1500, 8, 2, 1, 51865, 448, 8, 2, 1)
    torch.manual_seed(0)
    model = Whisper(dims)
    torch.save({"dims": dims.__dict__, "model_state_dict": model.state_dict()}, tmp_path / "tiny.pt")
    heard = Transcriber(str(tmp_path / "tiny.pt"))
    assert heard.hear(gallery / "clip1.mp4") == [], "a clip without a sound track"
    tuned = write_sound(tmp_path / "tone.mkv", tone(2.0, frequency=400.0))
    given = []

    def transcribe(waveform, **_):
        given.append(len(waveform))
        return {"segments": [{"start": 0.5, "end": 1, "text": " a tone "}, {"start": 1, "end": 2, "text": " "}]}

    heard.model.transcribe = transcribe
    assert heard.hear(tuned) == [Said(0.5, 1.0, "a tone")]
    assert given[0] == pytest.approx(32000, rel=0.02)
