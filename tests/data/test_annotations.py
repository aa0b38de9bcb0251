"""Annotation files: their videos and texts, and errors for files that contradict themselves."""

import itertools
import json
import pickle
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tvr_lightning.data import LSMDC, MSRVTT, MSRVTTQA, MSVD, VATEX, ActivityNet, Charades, DiDeMo, TextVideoDataModule
from tvr_lightning.data.lsmdc import DROPPED
from tvr_lightning.data.msrvtt_qa import QuestionRecord
from tvr_lightning.data.msvd import read_captions
from tvr_lightning.data.records import AnnotationError, Problem, Split, read_table, shared_videos
from tvr_lightning.errors import MissingAssetError

TEST_LSMDC = "LSMDC16_challenge_1000_publictect.csv"
MSVD_CLIP, VATEX_CLIP, VATEX_OTHER = "-_hbPLsZvvo_172_179", "_0y-_Z0_oA_000248_000258", "Bfyp0C02sko_000000_000010"
LSMDC_CLIP = "1054_Harry_Potter_02.07.17.409-02.07.23.396"
PARAGRAPHS = {
    "v_a-1": {"duration": 8.2, "timestamps": [[0, 3], [3, 9]], "sentences": ["A man runs.", " He\nstops."]},
    "v__b2": {"duration": 5.0, "timestamps": [[0, 5]], "sentences": ["\nA dog barks."]},
}
CHARADES = """\
id,subject,scene,quality,relevance,verified,script,objects,descriptions,actions,length
46GP8,HR43,Kitchen,6,7,Yes,"A person cooks, then sneezes.",food;stove,A person cooks.,c092 11.90 21.20,24.83
N11GT,0KZ7,Stairs,6,7,Yes,One person opens a blanket.,blanket,{},c098 8.60 14.20,12.17
"""
SCRIPT = "One person opens a blanket."
MOMENTS = """\
N11GT 1.0 8.5##a person shakes a blanket.
46GP8 0.0 6##person cooks.
N11GT 1.0 8.5##the person folds it.
46GP8 20.9 12.0##person sneezes.
N11GT 38.0 13.0##person opens the cabinet.
"""
DESCRIPTIONS = [
    {"video": "2@N01_b.", "description": "a bug crawls.", "times": [[4, 4]]},
    {"video": "1@N08_a.mov", "description": "someone kicks\na bug", "times": [[0, 1]]},
    {"video": "9@N01_z.avi", "description": "not in the list", "times": [[0, 1]]},
    {"video": "2@N01_b.", "description": "it stops", "times": [[5, 5]]},
]
MSRVTT_IDS = ["video7010", "video9770", "video9771"]
SENTENCES = [
    ("video7010", "a clip showing a computer screen"),
    ("video9770", "a man gives a speech"),
    ("video7010", "a person  explains\ta program "),
    ("video9771", "a girl does gymnastics"),
]
TOKENS = {MSVD_CLIP: [["a", "dog", "runs"], ["it", "s", "a", "dog"]], "x_1_2": [["a", "cat"]]}
BILINGUAL = {
    VATEX_OTHER: {"enCap": ["two eggs", "a pan"], "chCap": ["两个鸡蛋", "平底锅"]},
    VATEX_CLIP: {"enCap": ["a dog", "a cat"], "chCap": ["一只狗", "一只猫"]},
}


def sentences(pairs: list[tuple[str, str]]) -> dict:
    videos = [{"video_id": name, "category": 9, "split": "train", "id": i} for i, name in enumerate(MSRVTT_IDS)]
    said = [{"caption": text, "video_id": name, "sen_id": i} for i, (name, text) in enumerate(pairs)]
    return {"info": {}, "videos": videos, "sentences": said}


def lsmdc(*lines: tuple[str, str]) -> str:
    return "".join("\t".join([clip, *["02.07.17.409"] * 4, sentence]) + "\n" for clip, sentence in lines)


FILES: dict[type, dict] = {
    ActivityNet: {"val_1.json": PARAGRAPHS, "val_ids.json": ["v__b2", "v_a-1"]},
    Charades: {"Charades_v1_test.csv": CHARADES, "charades_sta_test.txt": MOMENTS},
    DiDeMo: {
        "test_list.txt": "1@N08_a.mov\n2@N01_b.\n",
        "test_data.json": DESCRIPTIONS,
        "videos/1@N08_a.mp4": "",
        "videos/2@N01_b.mp4": "",
    },
    LSMDC: {},
    MSRVTT: {
        "MSRVTT_data.json": sentences(SENTENCES),
        "MSRVTT_train.9k.csv": "video_id\nvideo7010\n",
        "MSRVTT_JSFUSION_test.csv": "video_id,sentence\nvideo9770,x\n",
        **{f"videos/{name}.mp4": "" for name in MSRVTT_IDS},
    },
    MSRVTTQA: {
        "test_qa.json": [
            {"id": 1, "question": "Who  runs?", "answer": "man", "category_id": 3, "video_id": 7},
            {"question": "what is it", "answer": "dog", "video_id": "video7"},
            {"question": "what is it", "answer": "cat", "video_id": "8"},
        ]
    },
    MSVD: {
        "test_list.txt": b"\xef\xbb\xbf" + f"{MSVD_CLIP}\r\nx_1_2\r\n".encode(),
        "raw-captions.pkl": pickle.dumps(TOKENS),
    },
    VATEX: {
        **{f"{name}_list.txt": f"{VATEX_CLIP}\n{VATEX_OTHER}" for name in ("train", "test")},
        "vatex_data.json": BILINGUAL,
        "vatex_validation_v1.0.json": [{"videoID": clip, **record} for clip, record in BILINGUAL.items()],
    },
}


def written(root: Path, kind: type, changed: dict | None = None, **options) -> TextVideoDataModule:
    """Write a dataset's files, some of them with other contents, and return its data module."""
    for name, content in {**FILES[kind], **(changed or {})}.items():
        path = root / kind.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str | bytes) else json.dumps(content, ensure_ascii=False)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return kind(root=str(root), **options)


def pairs(split: Split) -> list[tuple[str, str]]:
    return [(split.videos[text.video].video_id, text.text) for text in split.texts]


def paths(split: Split, folder: Path) -> list[str]:
    return [video.path.relative_to(folder / "videos").as_posix() for video in split.videos]


def test_activitynet_joins_sentences_and_can_end_videos_at_their_annotated_duration(tmp_path):
    data = written(tmp_path, ActivityNet, {"val_ids.json": ["v__b2", "v_none", "v_a-1"]})
    split, findings = data.examine_split("test")
    assert pairs(split) == [("v__b2", "A dog barks."), ("v_a-1", "A man runs. He stops.")]
    assert paths(split, data.folder) == ["v__b2.mp4", "v_a-1.mp4"]
    assert (findings.problems, [note.entry for note in findings.notes]) == ([], ["v_none"])
    assert "val1" in split.protocol
    assert data.validation == "test"
    annotations = {**PARAGRAPHS, "v_c": {"sentences": ["A cat."]}}
    files = {"val_1.json": annotations, "val_ids.json": ["v_a-1", "v__b2", "v_c"]}
    for end, spans in ((True, [(0.0, 9.0), (0.0, 5.0), None]), (False, [None] * 3)):
        videos = written(tmp_path, ActivityNet, files, annotated_end=end).read_split("test").videos
        assert [video.span for video in videos] == spans
    annotations["v_c"]["duration"] = "long"
    with pytest.raises(AnnotationError, match="v_c, duration: 'long' is not a length in seconds"):
        written(tmp_path, ActivityNet, files, annotated_end=True).read_split("test")


def test_reversed_spans_of_charades_are_swapped_and_spans_outside_the_video_replaced(tmp_path):
    split, findings = written(tmp_path, Charades, split="sta").examine_split("test")
    spans = [("N11GT", (1.0, 8.5)), ("46GP8", (0.0, 6.0)), ("46GP8", (12.0, 20.9)), ("N11GT", (0.0, 12.17))]
    assert [(v.path.stem, v.span) for v in split.videos] == spans
    assert len({v.video_id for v in split.videos}) == 4
    first = [(t.video, t.text) for t in split.texts][:2]
    assert first == [(0, "a person shakes a blanket."), (0, "the person folds it.")]
    assert (findings.problems, [note.entry for note in findings.notes]) == ([], ["line 4", "line 5"])


def test_didemo_joins_descriptions_and_finds_files_by_name(tmp_path):
    data = written(tmp_path, DiDeMo)
    split = data.read_split("test")
    assert pairs(split) == [("1@N08_a.mov", "someone kicks a bug"), ("2@N01_b.", "a bug crawls. it stops")]
    assert paths(split, data.folder) == ["1@N08_a.mp4", "2@N01_b.mp4"]
    assert {v.span for v in split.videos} == {(0.0, 31.0)}
    for seconds, span in ((5.0, (0.0, 5.0)), (None, None)):
        videos = written(tmp_path, DiDeMo, seconds=seconds).read_split("test").videos
        assert {video.span for video in videos} == {span}
    assert [DiDeMo(split="hub", holdout=held).validation for held in (0, 5)] == ["test", "holdout"]
    table = "success,video_path,starts,ends,text,formatted_data\n" + (  # with newlines in fields and absolute paths
        'True,/home/x/videos/2@N01_b.,tensor([[0]]),tensor([[31]]),"a bug, \ncrawls.\n it stops",/home/x/0.pth\n'
    )
    csv = written(tmp_path, DiDeMo, {"tmass/didemo_test_label.csv": table}, split="tmass").read_split("test")
    assert (pairs(csv), paths(csv, data.folder)) == ([("2@N01_b.", "a bug, crawls. it stops")], ["2@N01_b.mp4"])
    videos = data.folder / "videos"
    (videos / "1@N08_a.mp4").unlink()  # and is expected under the listed name
    assert DiDeMo(root=str(tmp_path)).read_split("test").videos[0].path == videos / "1@N08_a.mov"
    split = written(tmp_path, DiDeMo, {"videos/1@N08_a.mov": ""}).read_split("test")
    assert split.videos[0].path.name == "1@N08_a.mov", "before any other container"
    with pytest.raises(AnnotationError, match=r"2@N01_b\.: several files match: 2@N01_b\.avi, 2@N01_b\.mp4"):
        written(tmp_path, DiDeMo, {"videos/2@N01_b.avi": ""}).read_split("test")


@pytest.mark.parametrize(("split", "count"), [("lsmdc16", 3), ("xpool", 2), ("gaid", 1)])
def test_released_splits_of_lsmdc_omit_test_clips_only(tmp_path, split, count):
    lines = lsmdc(*((clip, f"Sentence {clip}.") for clip in [LSMDC_CLIP, *DROPPED["gaid"]]))
    again = lsmdc((LSMDC_CLIP, "The last sentence."))
    data = written(tmp_path, LSMDC, {"LSMDC16_annos_training.csv": lines + again, TEST_LSMDC: lines}, split=split)
    train = data.read_split("train")
    assert len(train.videos) == 3
    assert [text.text for text in train.texts if text.video == 0][-1] == "The last sentence."
    assert len(train.texts) == (4 if split == "lsmdc16" else 3)
    test = data.read_split("test")
    first, second = DROPPED["gaid"]
    assert [video.video_id for video in test.videos] == [LSMDC_CLIP, *(second, first)[: count - 1][::-1]]
    assert f"{997 + count:,} public test clips" in test.protocol


def test_questions_have_answers_and_kinds(tmp_path):
    split = written(tmp_path, MSRVTTQA).read_split("test")
    assert [video.video_id for video in split.videos] == ["video7", "video8"]
    expected = [("Who runs?", 0, "man"), ("what is it", 0, "dog"), ("what is it", 1, "cat")]
    assert split.texts == [QuestionRecord(*question) for question in expected]
    assert [question.kind for question in split.texts] == ["who", "what", "what"]


def test_questions_about_missing_videos_stop_the_run_or_are_skipped(tmp_path):
    entries = [{"question": "who", "answer": "man", "video_id": number} for number in (7, 8, 9)]
    data = written(tmp_path, MSRVTTQA, {"train_qa.json": entries, "videos/video7.mp4": ""}, num_workers=0)
    with pytest.raises(MissingAssetError, match=r"2 of the 3 video files (?s:.*)on_corrupt"):
        data.load_split("train")
    forgiving = MSRVTTQA(root=str(tmp_path), num_workers=0, on_corrupt="skip")
    assert [question.answer for question in forgiving.questions("train")] == ["man"]
    assert len(forgiving.load_split("train").videos) == 1


def test_synthetic_questions_are_about_the_videos_of_their_split(msrvtt):
    scenes = json.loads((msrvtt / "msrvtt" / "scenes.json").read_text())["videos"]
    data = MSRVTTQA(root=str(msrvtt), num_workers=0)
    for part in ("train", "val", "test"):
        split = data.read_split(part)
        assert {video.video_id for video in split.videos} == {i for i, v in scenes.items() if v["part"] == part}
        for question in split.texts:
            scene = scenes[split.videos[question.video].video_id]["scene"]
            if "background" in question.text and "color" in question.text:
                assert question.answer == scene["backdrop"]["color"]
            if "first" in question.text and "shape" in question.text:
                assert question.answer == scene["events"][0]["figure"]["shape"]
    assert split.videos == MSRVTT(root=str(msrvtt)).read_split("test").videos
    few = MSRVTTQA(root=str(msrvtt), num_workers=0, max_train_videos=3).questions("train")
    assert {(q.text, q.answer) for q in few} <= {(q.text, q.answer) for q in data.questions("train")}
    assert Counter(q.video for q in few) == {0: 5, 1: 5, 2: 5}


def test_missing_annotations_are_reported_with_the_layout(tmp_path):
    folder = written(tmp_path, MSRVTT).folder
    (folder / "MSRVTT_train.9k.csv").unlink()
    with pytest.raises(MissingAssetError, match=re.escape(str(folder / "MSRVTT_train.9k.csv"))) as caught:
        MSRVTT(root=str(tmp_path)).setup("fit")
    assert "videos/video0.mp4" in str(caught.value)
    MSRVTT(root=str(tmp_path)).check_present("test")
    with pytest.raises(MissingAssetError) as caught:
        MSRVTT(root=str(tmp_path), split="7k").check_present()
    absent = [line for line in str(caught.value).splitlines() if "looked for" in line]
    assert absent == [f"  - MSRVTT_train.7k.csv: looked for {folder / 'MSRVTT_train.7k.csv'}"]


def test_pickles_of_every_protocol_are_read_and_their_code_is_not_run(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        split = written(tmp_path, MSVD, {"raw-captions.pkl": pickle.dumps(TOKENS, protocol)}).read_split("test")
        assert pairs(split) == [(MSVD_CLIP, "a dog runs"), (MSVD_CLIP, "it s a dog"), ("x_1_2", "a cat")]
    call = f"cos\nmkdir\n(V{tmp_path / 'made'}\ntR.".encode()  # a pickle that creates a folder
    data = written(tmp_path, MSVD, {"raw-captions.pkl": call})
    with pytest.raises(AnnotationError, match=r"raw-captions\.pkl: whole file: .*mkdir.*only dicts, lists and strings"):
        data.read_split("test")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([TOKENS], "top level: expected dict, found list"),
        ({MSVD_CLIP: [["a", 3]]}, rf"{MSVD_CLIP}\[0\]\[1\]: expected str, found int"),
        ({7: []}, "key 7: expected str, found int"),
        *((content, r"raw-captions\.pkl: whole file: not a pickle of plain captions")
          for content in (b"", b"no pickle", b"\x80\x02}q", b"\x80\x04\x95" + b"\xff" * 8, pickle.dumps(TOKENS)[:-9])),
    ],
)  # fmt: skip
def test_pickles_with_another_structure_are_refused(tmp_path, content, message):
    file = tmp_path / "raw-captions.pkl"
    file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    with pytest.raises(AnnotationError, match=message):
        read_captions(file)


def test_the_first_captions_of_vatex_can_be_the_only_queries(tmp_path):
    every, first = written(tmp_path, VATEX), VATEX(root=str(tmp_path), protocol="first-caption")
    assert pairs(first.read_split("test")) == pairs(every.read_split("test"))[::2]
    assert len(first.read_split("train").texts) == 4
    assert first.read_split("test").protocol != every.read_split("test").protocol


FALSE_LISTS = f"{VATEX_CLIP}\nmissing_000000_000010\nshort_1_2"
TWICE = [{"videoID": VATEX_CLIP, "enCap": ["x"]}] * 2


@pytest.mark.parametrize(
    ("kind", "options", "file", "content", "problems", "named"),
    [
        (ActivityNet, {}, "val_ids.json", ["v_a-1"], "caption-without-video", "v__b2: val_ids.json does not list it"),
        (ActivityNet, {}, "val_1.json", {**PARAGRAPHS, "v_a-1": {"sentences": []}}, "video-without-caption", "v_a-1"),
        (ActivityNet, {}, "val_1.json", {**PARAGRAPHS, "v_a-1": {"sentences": ["x", " "]}}, "empty-caption",
         "v_a-1, caption 1"),
        (ActivityNet, {}, "val_1.json", {"v_a-1": {}}, "malformed", "the key 'sentences' is missing"),
        (ActivityNet, {}, "val_1.json", '{"v_a": {"sentences": ["x"]}, "v_a": {"sentences": ["y"]}}', "duplicate-id",
         "val_1.json: v_a: the key occurs 2 times"),
        (Charades, {}, "Charades_v1_test.csv", CHARADES.replace(SCRIPT, "{}"), "empty-caption", "N11GT, caption 0"),
        (Charades, {"split": "sta"}, "charades_sta_test.txt", MOMENTS + "\n46GP8 0.0##x\n", "malformed",
         "line 7: cannot be read"),
        (Charades, {"split": "sta"}, "charades_sta_test.txt", MOMENTS + "XXXXX 0.0 1.0##x\n", "caption-without-video",
         "line 6: sentence for XXXXX"),
        (Charades, {"split": "sta"}, "Charades_v1_test.csv", CHARADES.replace("24.83", "long"), "malformed",
         "46GP8: length 'long' is not a number"),
        (DiDeMo, {}, "test_list.txt", "1@N08_a.mov\n3@N01_c.avi\n", "video-without-caption",
         "test_data.json: 3@N01_c.avi"),
        (LSMDC, {}, TEST_LSMDC, lsmdc(*[(LSMDC_CLIP, "x")] * 2), "duplicate-id", "line 2: 1054_Harry_Potter"),
        (LSMDC, {}, TEST_LSMDC, lsmdc((LSMDC_CLIP, "x")) + "x\ty\n", "malformed", "line 2: 2 columns"),
        (LSMDC, {}, TEST_LSMDC, lsmdc(("1054_Harry", "x"), (LSMDC_CLIP, "x")), "malformed", "line 1: no clip id"),
        (MSRVTT, {}, "MSRVTT_data.json", sentences([*SENTENCES, ("video1", "a dog"), ("video7010", "  ")]),
         "caption-without-video empty-caption", "sentences[4]: caption for video1"),
        (MSRVTT, {}, "MSRVTT_data.json", sentences(SENTENCES[1:2]), "video-without-caption", "MSRVTT_train.9k.csv"),
        (MSRVTT, {}, "MSRVTT_train.9k.csv", "video_id\nvideo7010\nvideo7010\n", "duplicate-id", "occurs 2 times"),
        (MSRVTT, {}, "MSRVTT_train.9k.csv", "id\nvideo7010\n", "malformed", "header: column 'video_id' is missing"),
        (MSRVTT, {}, "MSRVTT_train.9k.csv", "video_id\n", "malformed", "lists no videos"),
        (MSRVTT, {}, "MSRVTT_data.json", '{"videos": [\n}', "malformed",
         "MSRVTT_data.json: line 2 column 1: not JSON"),
        (MSRVTT, {}, "MSRVTT_data.json", '{"videos": ' + 100_000 * "[", "malformed", "nested too deeply"),
        (MSRVTT, {}, "MSRVTT_data.json", {"videos": [{"video_id": 3}], "sentences": []}, "malformed",
         "videos[0], video_id: expected str, found int"),
        (MSRVTT, {}, "MSRVTT_data.json", b'{"videos": "\xff"}', "malformed", "byte 12: not UTF-8"),
        (MSRVTTQA, {}, "test_qa.json", [], "malformed", "contains no questions"),
        (MSRVTTQA, {}, "test_qa.json", [{"answer": "man", "video_id": 7}], "malformed", "[0]: the key 'question' is"),
        (MSRVTTQA, {}, "test_qa.json", [{"question": "who", "answer": "man", "video_id": True}], "malformed",
         "[0]: the key 'video_id' is True"),
        (MSRVTTQA, {}, "test_qa.json", [{"question": " ", "answer": "man", "video_id": 7}], "empty-caption malformed",
         "[0], question: the question is empty"),
        (MSRVTTQA, {}, "test_qa.json", [{"question": "who", "answer": "", "video_id": 7}], "empty-caption malformed",
         "[0], answer: the answer is empty"),
        (VATEX, {}, "test_list.txt", FALSE_LISTS, "malformed video-without-caption video-without-caption",
         "short_1_2: no clip id"),
        (VATEX, {"annotations": "official"}, "vatex_validation_v1.0.json", TWICE, "duplicate-id video-without-caption",
         "occurs 2 times"),
    ],
)  # fmt: skip
def test_contradictions_are_reported_with_file_entry_and_fix(tmp_path, kind, options, file, content, problems, named):
    data = written(tmp_path, kind, {file: content}, **options)
    for _ in range(2):  # every problem is reported each time that the split is read
        with pytest.raises(AnnotationError) as caught:
            data.read_split("train" if kind is MSRVTT else "test")
        assert " ".join(problem.kind for problem in caught.value.problems) == problems
        first = caught.value.problems[0]
        assert all(word in str(caught.value) for word in (named, first.file, first.fix))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('video_id,sentence\nv0,a cat\nv1,"a dog\nv2,a bird\n', "line 3: not CSV"),  # until the end of the file
        ('video_id,sentence\nv0,x\nv1,y\nv2,a "bird"\nv3,"a fish\n', "line 5: not CSV"),  # within a field, it is text
        ("video_id,sentence,sentence\nv0,a,b\n", "sentence: the column occurs 2 times"),
        ("video_id,sentence\n\nv0,a,b\n", "row 3: 3 fields, but the header has 2"),
    ],
)
def test_quoted_fields_of_tables_must_end(tmp_path, text, message):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(AnnotationError, match=rf"list\.csv: {message}"):
        read_table(tmp_path / "list.csv", ("video_id", "sentence"))
    (tmp_path / "list.csv").write_text('video_id,sentence\nv0,"a cat, a ""dog""\nand a bird"\nv1,a fish\n')
    rows = read_table(tmp_path / "list.csv", ("video_id", "sentence"))
    assert [row["sentence"] for row in rows] == ['a cat, a "dog"\nand a bird', "a fish"]
    problems = [Problem("a.csv", f"row {i}", "malformed", "wrong", "mend it") for i in range(8)]
    assert "and 3 more problems" in str(AnnotationError(problems))


SLOW = [
    (MSRVTT, "7k", {"train": (7010, 140_200), "test": (1000, 1000)}, [0, 0]),
    (MSRVTT, "full", {"train": (6513, 130_260), "val": (497, 9940), "test": (2990, 59_800)}, [0, 0, 0]),
    (MSVD, "official", {"train": (1200, 48_774), "val": (100, 4290), "test": (670, 27_763)}, [0, 0, 0]),
    (DiDeMo, "tmass", {"train": (8362, 8362), "val": (1062, 1062), "test": (1004, 1004)}, [0, 0, 0]),
]


@pytest.mark.parametrize(
    ("kind", "split", "sizes", "notes"),
    [
        (ActivityNet, "val1", {"train": (10_009, 10_009), "test": (4917, 4917)}, [15, 9]),
        (Charades, "scripts", {"train": (7985, 7985), "test": (1863, 1863)}, [0, 0]),
        (Charades, "sta", {"train": (None, 12_408), "test": (None, 3720)}, [4, 0]),
        (DiDeMo, "lists", {"val": (1065, 1065), "test": (1004, 1004)}, [0, 0]),
        (LSMDC, "lsmdc16", {"test": (1000, 1000)}, [0]),
        (MSRVTT, "9k", {"train": (9000, 180_000), "test": (1000, 1000)}, [0, 0]),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW),
    ],
)
def test_real_splits_have_the_published_sizes_and_do_not_overlap(test_data, kind, split, sizes, notes):
    data = kind(root=str(test_data / "annotations"), split=split)
    found = {name: data.examine_split(name) for name in sizes}
    for (one, findings), (videos, texts) in zip(found.values(), sizes.values(), strict=True):
        assert findings.problems == []
        assert (len(one.videos), len(one.texts)) == (videos or len(one.videos), texts)
        assert not any("\n" in t.text or t.text.startswith(" ") for t in one.texts)
        assert all(v.span is None or 0 <= v.span[0] < v.span[1] for v in one.videos)
    assert [len(findings.notes) for _, findings in found.values()] == notes
    for (one, _), (other, _) in itertools.combinations(found.values(), 2):
        assert shared_videos(one, other) == []
    assert data.validation == ("official" if kind in (DiDeMo, LSMDC, MSVD) or split == "full" else "test")


def test_held_out_spans_and_training_spans_have_different_files(test_data):
    data = Charades(root=str(test_data / "annotations"), split="sta", holdout=200)
    train, val = data.read_split("train"), data.read_split("val")
    assert len({video.path for video in val.videos}) == 200 < len(val.videos)
    assert shared_videos(train, val) == []


@pytest.mark.parametrize("kind", [MSRVTT, LSMDC, pytest.param(MSVD, marks=pytest.mark.slow)])
def test_real_files_can_have_any_line_ends(test_data, tmp_path, kind):
    plain = kind(root=str(test_data / "annotations"))
    shutil.copytree(test_data / "annotations" / "crlf" / kind.directory, tmp_path / kind.directory)
    if kind is MSVD:
        (tmp_path / "msvd" / "raw-captions.pkl").symlink_to(plain.folder / "raw-captions.pkl")
    assert kind(root=str(tmp_path)).read_split("test").texts == plain.read_split("test").texts


def test_real_lists_agree_with_those_of_other_sources(test_data):
    root = test_data / "annotations"
    videos = ActivityNet(root=str(root)).read_split("test").videos
    listed = (root / "crlf" / "activitynet" / "val_1_list.txt").read_text().split()
    assert {v.video_id for v in videos} == set(listed)
    lists, csv = (DiDeMo(root=str(root), split=split).read_split("test") for split in ("lists", "tmass"))
    assert dict(pairs(lists)) == dict(pairs(csv))


@pytest.mark.slow
def test_real_splits_of_vatex_have_the_published_sizes(real_vatex):
    data, official = VATEX(root=real_vatex), VATEX(root=real_vatex, annotations="official")
    for name in ("val", "test"):
        split = data.read_split(name)
        assert (len(split.videos), len(split.texts)) == (1500, 15_000)
        assert official.read_split(name).texts == split.texts
    assert len(VATEX(root=real_vatex, protocol="first-caption").read_split("test").texts) == 1500
    train, findings = data.examine_split("train")
    assert {p.kind for p in findings.problems} == {"video-without-caption"}  # the available file has no others
    ids = [{v.video_id for v in split.videos} for split in (train, data.read_split("val"), data.read_split("test"))]
    assert len(set.union(*ids)) == len(train.videos) + 3000 == 25_991 + 3000
