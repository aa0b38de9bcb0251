import json
import shutil
from pathlib import Path

import pytest

from tvr_lightning.data.records import AnnotationError
from tvr_lightning.data.vatex import VATEX

CLIP = "_0y-_Z0_oA_000248_000258"
OTHER = "Bfyp0C02sko_000000_000010"
CAPTIONS = {
    OTHER: {"enCap": ["two eggs", "a pan"], "chCap": ["两个鸡蛋", "平底锅"]},
    CLIP: {"enCap": ["a dog", "a cat"], "chCap": ["一只狗", "一只猫"]},
}


def write_excerpt(root: Path, listed: tuple[str, ...] = (CLIP, OTHER)) -> Path:
    folder = root / "vatex"
    (folder / "videos").mkdir(parents=True)
    for name in ("train", "test"):
        (folder / f"{name}_list.txt").write_text("\n".join(listed))
    (folder / "vatex_data.json").write_text(json.dumps(CAPTIONS, ensure_ascii=False), encoding="utf-8")
    (folder / "vatex_validation_v1.0.json").write_text(
        json.dumps([{"videoID": clip, **record} for clip, record in CAPTIONS.items()])
    )
    return folder


def texts(data: VATEX, name: str = "test") -> list[tuple[str, str]]:
    split = data.read_split(name)
    return [(split.videos[t.video].video_id, t.text) for t in split.texts]


def test_captions_follow_the_list_in_the_chosen_language(tmp_path):
    folder = write_excerpt(tmp_path)
    english = VATEX(root=str(tmp_path))
    assert texts(english) == [(CLIP, "a dog"), (CLIP, "a cat"), (OTHER, "two eggs"), (OTHER, "a pan")]
    assert english.read_split("test").videos[0].path == folder / "videos" / f"{CLIP}.mp4"
    chinese = VATEX(root=str(tmp_path), language="zh")
    assert [text for _, text in texts(chinese)] == ["一只狗", "一只猫", "两个鸡蛋", "平底锅"]
    assert "Chinese" in chinese.read_split("test").protocol
    assert texts(VATEX(root=str(tmp_path), annotations="official")) == texts(english)


def test_the_first_caption_alone_is_queried_but_all_of_them_train(tmp_path):
    write_excerpt(tmp_path)
    data = VATEX(root=str(tmp_path), protocol="first-caption")
    assert texts(data) == [(CLIP, "a dog"), (OTHER, "two eggs")]
    assert len(texts(data, "train")) == 4
    assert data.read_split("test").protocol != VATEX(root=str(tmp_path)).read_split("test").protocol


def test_contradictions_are_errors_that_name_file_and_entry(tmp_path):
    folder = write_excerpt(tmp_path, (CLIP, "missing_000000_000010", "short_1_2"))
    with pytest.raises(AnnotationError) as caught:
        VATEX(root=str(tmp_path)).read_split("test")
    assert [(p.kind, p.entry) for p in caught.value.problems] == [
        ("malformed", "short_1_2"),
        ("video-without-caption", "missing_000000_000010"),
        ("video-without-caption", "short_1_2"),
    ]
    (folder / "test_list.txt").write_text(CLIP)
    (folder / "vatex_data.json").write_text(json.dumps({CLIP: {"enCap": ["x"]}}))
    with pytest.raises(AnnotationError, match=rf"{CLIP}: the key 'chCap' is missing, found \['enCap'\]"):
        VATEX(root=str(tmp_path), language="zh").read_split("test")
    (folder / "vatex_validation_v1.0.json").write_text(json.dumps([{"videoID": CLIP, "enCap": ["x"]}] * 2))
    for _ in range(2):
        with pytest.raises(AnnotationError, match="occurs 2 times"):
            VATEX(root=str(tmp_path), annotations="official").read_split("test")


@pytest.fixture
def real(test_data: Path, tmp_path: Path) -> Path:
    source, folder = test_data / "annotations" / "vatex", tmp_path / "vatex"
    folder.mkdir()
    for name in ("train_list.txt", "val_list.txt", "test_list.txt"):
        shutil.copy(source / name, folder)
    shutil.copy(source / "vatex_data.VAL_ONLY.json", folder / "vatex_data.json")
    shutil.copy(source / "vatex_validation_v1.0.FROM_GT.json", folder / "vatex_validation_v1.0.json")
    return tmp_path


def test_real_splits_have_the_published_sizes(real):
    data, official = VATEX(root=str(real)), VATEX(root=str(real), annotations="official")
    for name in ("val", "test"):
        split = data.read_split(name)
        assert (len(split.videos), len(split.texts)) == (1500, 15_000)
        assert official.read_split(name).texts == split.texts
    assert len(VATEX(root=str(real), protocol="first-caption").read_split("test").texts) == 1500
    train, findings = data.examine_split("train")
    assert len(train.videos) == 25_991
    assert {p.kind for p in findings.problems} == {"video-without-caption"}  # the file at hand holds no others
    ids = [{v.video_id for v in split.videos} for split in (train, data.read_split("val"), data.read_split("test"))]
    assert len(set.union(*ids)) == 25_991 + 3000
