"""Datasets as people hold them: recognised, converted to what our readers read, or refused in a sentence."""

import errno
import json
import pickle
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from hub_stand_in import serving

from tvr_lightning.cli import main
from tvr_lightning.data import LSMDC, MSRVTT, MSVD, VATEX, ActivityNet, DiDeMo
from tvr_lightning.data.importing import ImportFailed, run
from tvr_lightning.data.importing.hub import fetch
from tvr_lightning.data.importing.layouts import DATASETS, LAYOUTS, PUBLISHED
from tvr_lightning.data.importing.run import ImportReport, import_dataset
from tvr_lightning.data.records import SYNTHETIC, Split
from tvr_lightning.data.video_files import stem


def bring(dataset: str, held: Path, root: Path, **options) -> ImportReport:
    return import_dataset(dataset, held, root, progress=False, **options)


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def captions_of(split: Split) -> dict[str, list[str]]:
    return {
        video.video_id: [split.texts[i].text for i in texts]
        for video, texts in zip(split.videos, split.texts_of_videos(), strict=True)
    }


def records(split: Split, source: str, ending: str = ".mp4", single: bool = False, **further) -> list[dict]:
    """Records of the hub's lists."""
    return [
        {
            "video_id": stem(video),
            "video": f"{further.get('folder', '')}{stem(video)}{ending}",
            "caption": said[0] if single else said,
            "source": source,
        }
        for video, said in captions_of(split).items()
    ]


def same(found: Split, expected: Split) -> None:
    assert [stem(video.video_id) for video in found.videos] == [stem(video.video_id) for video in expected.videos]
    assert found.texts == expected.texts
    assert found.protocol == expected.protocol


# Real annotations in the hub's layout


def test_the_hubs_msrvtt_gives_the_splits_of_the_official_files(test_data, tmp_path):
    held = tmp_path / "hub"
    real = {name: MSRVTT(root=str(test_data / "annotations"), split=name) for name in ("9k", "7k")}
    for name, official in real.items():
        write(held / f"msrvtt_train_{name}.json", records(official.read_split("train"), "MSR-VTT"))
    write(held / "msrvtt_test_1k.json", records(real["9k"].read_split("test"), "MSR-VTT", single=True))
    done = bring("msrvtt", held, tmp_path / "data")
    for name, official in real.items():
        data = MSRVTT(root=str(tmp_path / "data"), split=name)
        for part in ("train", "test"):
            same(data.read_split(part), official.read_split(part))
    assert done.splits["9k", "train"] == (9000, 180000)
    assert done.splits["7k", "train"] == (7010, 140200)
    assert done.splits["9k", "test"] == (1000, 1000)
    assert done.differences == []
    assert len(done.absent) == 10000


def test_the_hubs_msvd_gives_the_splits_of_clip4clips_files(test_data, tmp_path):
    held, real = tmp_path / "hub", MSVD(root=str(test_data / "annotations"))
    for name in ("train", "val", "test"):
        write(held / f"msvd_{name}.json", records(real.read_split(name), "MSVD", ".avi"))
    shutil.copytree(test_data / "annotations" / "msvd" / "videos", held / "raw_videos")
    done = bring("msvd", held, tmp_path / "data")
    data = MSVD(root=str(tmp_path / "data"))
    for name in ("train", "val", "test"):
        same(data.read_split(name), real.read_split(name))
    assert done.splits["", "train"] == (1200, 48774)
    assert done.splits["", "test"] == (670, 27763)
    assert (done.differences, done.new, len(done.absent)) == ([], 5, 1965)
    links = list((tmp_path / "data" / "msvd" / "videos").iterdir())
    assert len(links) == 5
    assert all(link.is_symlink() and link.resolve().parent == held / "raw_videos" for link in links)


def test_the_hubs_didemo_has_nothing_to_validate_on_and_that_is_said(test_data, tmp_path):
    real = DiDeMo(root=str(test_data / "annotations"))
    # The training descriptions are not among the test data; those of the validation split stand for them.
    for name, ours in (("train", "val"), ("test", "test")):
        rows = records(real.read_split(ours), "DiDeMo", single=True, folder=f"{name}/")
        rows = [{key: value for key, value in row.items() if key != "video_id"} for row in rows]
        write(tmp_path / "hub" / f"didemo_{name}.json", rows)
    done = bring("didemo", tmp_path / "hub", tmp_path / "data")
    data = DiDeMo(root=str(tmp_path / "data"), split="hub")
    same(data.read_split("test"), real.read_split("test"))
    same(data.read_split("train"), real.read_split("val"))
    assert data.validation == "test"
    assert DiDeMo(root=str(tmp_path), split="hub", holdout=5).validation == "holdout"
    assert done.splits["hub", "test"] == (1004, 1004)
    assert any("hub, train has 1,065 videos, but the protocol has 8,392" in line for line in done.lines())


def test_the_hubs_activitynet_gives_the_splits_of_the_official_files(test_data, tmp_path):
    real = test_data / "annotations"
    for theirs, ids, sentences in (("train", "train_ids", "train"), ("val1", "val_ids", "val_1")):
        said = json.loads((real / "activitynet" / f"{sentences}.json").read_text())
        listed = json.loads((real / "activitynet" / f"{ids}.json").read_text())
        rows = [
            {"video_id": v, "video": f"{v}.mp4", "caption": " ".join(said[v]["sentences"]), **said[v]}
            for v in listed
            if v in said
        ]
        write(tmp_path / "hub" / f"activitynet_captions_{theirs}.json", rows)
    done = bring("activitynet", tmp_path / "hub", tmp_path / "data")
    for name in ("train", "test"):
        same(ActivityNet(root=str(tmp_path / "data")).read_split(name), ActivityNet(root=str(real)).read_split(name))
    assert done.splits == {("", "train"): (10009, 10009), ("", "test"): (4917, 4917)}
    assert done.differences == []


def test_vatex_and_lsmdc_in_the_hubs_layout_give_the_captions_of_their_own(test_data, tmp_path):
    real = test_data / "annotations"
    trial = tmp_path / "real" / "vatex"
    trial.mkdir(parents=True)
    for file in ("train_list.txt", "val_list.txt", "test_list.txt"):
        (trial / file).symlink_to(real / "vatex" / file)
    (trial / "vatex_data.json").symlink_to(real / "vatex" / "vatex_data.VAL_ONLY.json")
    official = VATEX(root=str(tmp_path / "real"))
    for name in ("val", "test"):
        write(tmp_path / "hub" / f"vatex_{name}.json", records(official.read_split(name), "VATEX"))
    write(tmp_path / "hub" / "vatex_train.json", [{"video": "a-b_000001_000011.mp4", "caption": ["one", "two"]}])
    done = bring("vatex", tmp_path / "hub", tmp_path / "data")
    for name in ("val", "test"):
        same(VATEX(root=str(tmp_path / "data")).read_split(name), official.read_split(name))
    assert done.splits["", "train"] == (1, 2)

    clips = LSMDC(root=str(real)).read_split("test")
    for name in ("train", "val", "test_1000"):
        rows = [{"video": f"{v.path.parent.name}/{v.video_id}.avi", "caption": said[0]} for v, said in
                zip(clips.videos, captions_of(clips).values(), strict=True)]  # fmt: skip
        write(tmp_path / "lists" / f"lsmdc_ret_{name}.json", rows)
    bring("lsmdc", tmp_path / "lists", tmp_path / "data")
    same(LSMDC(root=str(tmp_path / "data")).read_split("test"), clips)


# Other layouts


def test_clip4clips_and_official_files_are_brought_from_folders_below(test_data, tmp_path, capsys):
    real = test_data / "annotations" / "msrvtt"
    held = tmp_path / "MSRVTT"
    for file in ("MSRVTT_data.json", "MSRVTT_train.9k.csv", "MSRVTT_JSFUSION_test.csv"):
        (held / "msrvtt_data").mkdir(parents=True, exist_ok=True)
        (held / "msrvtt_data" / file).symlink_to(real / file)
    (held / "videos" / "all").mkdir(parents=True)
    for clip in (real / "videos").iterdir():
        (held / "videos" / "all" / clip.name).symlink_to(clip)
    assert main(["data", "import", "msrvtt", f"--from={held}", f"--root={tmp_path / 'data'}"]) == 1
    said = capsys.readouterr().out
    assert "MSR-VTT in the clip4clip layout" in said
    assert "9k, train: 9,000 videos, 180,000 texts" in said
    assert "Captions without videos: 9985," in said
    assert "3 annotation files and 15 videos are new" in said
    for path in (held / "msrvtt_data").iterdir():
        assert (tmp_path / "data" / "msrvtt" / path.name).read_bytes() == path.read_bytes()

    data = json.loads((real / "MSRVTT_data.json").read_text())
    train_val = {video["video_id"] for video in data["videos"] if video["split"] != "test"}
    for file, mine in (("train_val_videodatainfo.json", True), ("test_videodatainfo.json", False)):
        part = {k: [one for one in data[k] if (one["video_id"] in train_val) is mine] for k in ("videos", "sentences")}
        write(tmp_path / "official" / file, part)
    done = bring("msrvtt", tmp_path / "official", tmp_path / "other")
    full = [MSRVTT(root=str(root), split="full") for root in (tmp_path / "other", real.parent)]
    for name in ("train", "val", "test"):
        same(full[0].read_split(name), full[1].read_split(name))
    assert any("not the 1k-A pairs" in line for line in done.lines())


def test_official_msvd_and_didemo_files_become_clip4clips(test_data, tmp_path):
    real = test_data / "annotations"
    held = tmp_path / "raw"
    held.mkdir()
    for name in ("train", "val", "test"):
        (held / f"{name}_list.txt").symlink_to(real / "msvd" / f"{name}_list.txt")
    tokens = pickle.loads((real / "msvd" / "raw-captions.pkl").read_bytes())
    write(held / "AllVideoDescriptions.txt", "# a comment\n\n" + "".join(
        f"{clip} {' '.join(words)}\n" for clip, said in tokens.items() for words in said))  # fmt: skip
    assert "keep punctuation" in bring("msvd", held, tmp_path / "data").differences[0]
    for name in ("train", "val", "test"):
        same(MSVD(root=str(tmp_path / "data")).read_split(name), MSVD(root=str(real)).read_split(name))

    moments = tmp_path / "moments"
    moments.mkdir()
    for name in ("val", "test"):
        (moments / f"{name}_data.json").symlink_to(real / "didemo" / f"{name}_data.json")
    write(moments / "train_data.json", [{"video": "1@N_a.mov", "description": "a dog"}])
    done = bring("didemo", moments, tmp_path / "data")
    assert done.splits["lists", "test"] == (1037, 1037)
    assert "lists, test has 1,037 videos, but the protocol has 1,004" in done.differences


# Videos


def hub(folder: Path, clips: dict[str, str]) -> Path:
    """An MSR-VTT of two videos to train on and two to test in the hub's layout, captions by video."""
    names = list(clips)
    train = [{"video_id": v, "video": f"{v}.mp4", "caption": [clips[v], "again"]} for v in names[:2]]
    write(folder / "msrvtt_train_9k.json", train)
    test = [{"video_id": v, "video": f"{v}.mp4", "caption": clips[v]} for v in names[2:]]
    write(folder / "msrvtt_test_1k.json", test)
    return folder


CLIPS = {f"video{i}": f"caption {i}" for i in range(4)}


def zipped(path: Path, names: list[str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("video/", "")
        for name in names:
            archive.writestr(f"video/{name}", name.encode() * 1000)
        archive.writestr("video/readme.txt", "no video")


def test_a_zip_is_unpacked_and_gone_on_with(tmp_path):
    held = hub(tmp_path / "hub", CLIPS)
    zipped(held / "MSRVTT_Videos.zip", [f"{v}.mp4" for v in CLIPS] + ["video9.mp4"])
    done = bring("msrvtt", held, tmp_path)
    assert (done.new, done.present, done.unused, done.absent) == (4, 0, ["video9"], [])
    assert (tmp_path / "msrvtt" / "videos" / "video2.mp4").read_bytes() == b"video2.mp4" * 1000
    (tmp_path / "msrvtt" / "videos" / "video1.mp4").unlink()
    again = bring("msrvtt", held, tmp_path)
    assert (again.new, again.present, again.written) == (1, 3, [])
    data = MSRVTT(root=str(tmp_path))
    data.setup()
    assert [text.text for text in data.read_split("test").texts] == ["caption 2", "caption 3"]
    assert data.warnings == []


TWELVE = {f"video{i}": f"caption {i}" for i in range(12)}


def parts_of_a_tar(tmp_path, numbers):
    """Write twelve videos as a tar in as many parts as there are numbers; return the folder and the videos' bytes."""
    held = hub(tmp_path / "hub", TWELVE)
    for video in TWELVE:
        write(tmp_path / "loose" / f"{video}.mp4", f"{video:>9}" * 3000)
    whole = tmp_path / "whole.tar"
    with tarfile.open(whole, "w") as archive:
        archive.add(tmp_path / "loose", "Videos")
    content = whole.read_bytes()
    size = -(-len(content) // len(numbers) // 512) * 512
    for place, number in enumerate(numbers):
        (held / f"Videos.tar.part{number}").write_bytes(content[place * size : (place + 1) * size])
    return held, {path.name: path.read_bytes() for path in (tmp_path / "loose").iterdir()}


@pytest.mark.parametrize("numbers", [["-000", "-001", "-002"], range(12), range(1, 13), ["aa", "ab", "ac"]])
def test_parts_of_a_tar_are_joined_in_natural_order(tmp_path, numbers):
    held, videos = parts_of_a_tar(tmp_path, numbers)
    assert bring("msrvtt", held, tmp_path / "data").new == 12
    assert {p.name: p.read_bytes() for p in (tmp_path / "data" / "msrvtt" / "videos").iterdir()} == videos


def test_nothing_is_unpacked_from_a_tar_whose_parts_do_not_belong_together(tmp_path):
    held, videos = parts_of_a_tar(tmp_path, range(12))
    part = {path.name.removeprefix("Videos.tar.part"): path for path in held.glob("Videos.tar.part*")}
    whole = {number: path.read_bytes() for number, path in part.items()}
    part["2"].write_bytes(whole["9"])
    part["9"].write_bytes(whole["2"])
    with pytest.raises(ImportFailed, match=r"Videos\.tar\.part0 is truncated or damaged"):
        bring("msrvtt", held, tmp_path / "data")
    assert not list((tmp_path / "data").rglob("*.mp4"))
    part["2"].unlink()
    with pytest.raises(ImportFailed, match=r"Videos\.tar: part 2 is missing"):
        bring("msrvtt", held, tmp_path / "data")
    part["2"].write_bytes(whole["2"])
    part["9"].write_bytes(whole["9"])
    part["11"].unlink()
    with pytest.raises(ImportFailed, match=r"part0 is truncated or damaged \(unexpected end of data\)"):
        bring("msrvtt", held, tmp_path / "data")
    assert not list((tmp_path / "data").rglob("*.writing"))
    part["11"].write_bytes(whole["11"])
    assert not bring("msrvtt", held, tmp_path / "data").absent
    assert {p.name: p.read_bytes() for p in (tmp_path / "data" / "msrvtt" / "videos").iterdir()} == videos


def full_disk(monkeypatch):
    """Let the third video meet a full disk."""
    write, written = run.write_whole, []

    def full(target, content):
        written.append(target)
        if sum(file.suffix == ".mp4" for file in written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        write(target, content)

    monkeypatch.setattr(run, "write_whole", full)


def encrypted(content: bytes) -> bytes:
    data = bytearray(content)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flags in both headers of every member
        place = -1
        while (place := data.find(signature, place + 1)) >= 0:
            data[place + offset] |= 1
    return bytes(data)


BROKEN = r"MSRVTT_Videos\.zip is truncated or damaged \(.*Download it again and rerun the command\."


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda data: data[: len(data) // 2], BROKEN),
        (lambda data: data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :], BROKEN),
        (encrypted, r"MSRVTT_Videos\.zip is encrypted\. Unpack it, and import the folder with its files\."),
        (None, "No space left on device. Imported videos are kept. To resume, free disk space, or check"),
    ],
)
def test_a_broken_zip_or_a_full_disk_is_one_sentence_and_the_same_command_resumes(
    tmp_path, capsys, monkeypatch, harm, sentence
):
    held = hub(tmp_path / "hub", CLIPS)
    file = held / "MSRVTT_Videos.zip"
    zipped(file, [f"{v}.mp4" for v in CLIPS])
    content = file.read_bytes()
    if harm is None:
        full_disk(monkeypatch)
    else:
        file.write_bytes(harm(content))
    command = ["data", "import", "msrvtt", f"--from={held}", f"--root={tmp_path}"]
    assert main(command) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("tvr: ")
    assert re.search(sentence, said)
    monkeypatch.undo()
    file.write_bytes(content)
    assert main(command) == 0
    assert len(list((tmp_path / "msrvtt" / "videos").iterdir())) == 4


def test_links_to_a_folder_that_has_moved_are_repaired_by_importing_it_again(tmp_path):
    held = hub(tmp_path / "hub", CLIPS)
    for video in CLIPS:
        write(held / "video" / f"{video}.mp4", video)
    assert bring("msrvtt", held, tmp_path).new == 4
    moved = held.rename(tmp_path / "moved")
    (moved / "video" / "video3.mp4").unlink()
    again = bring("msrvtt", moved, tmp_path)
    assert (again.new, again.present, again.absent) == (3, 0, ["video3"])
    assert (tmp_path / "msrvtt" / "videos" / "video2.mp4").read_text() == "video2"


def test_captions_without_videos_and_videos_without_captions_are_a_sentence_each(tmp_path, capsys):
    held = hub(tmp_path / "hub", CLIPS)
    for name in ("video0", "video2", "video3", "holiday"):
        write(held / "video" / f"{name}.mp4", name)
    assert main(["data", "import", "msrvtt", f"--from={held}", f"--root={tmp_path}", "--videos=copy"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "Videos without captions, not imported: 1, holiday" in said
    assert any(line.startswith("Captions without videos: 1, video1. Add") for line in said)
    placed = sorted((tmp_path / "msrvtt" / "videos").iterdir())
    assert [path.name for path in placed] == ["video0.mp4", "video2.mp4", "video3.mp4"]
    assert not any(path.is_symlink() for path in placed)
    assert (held / "video" / "video0.mp4").is_file()


# What is refused


def test_nothing_that_is_there_is_overwritten(tmp_path):
    held = hub(tmp_path / "hub", CLIPS)
    for video in CLIPS:
        write(held / f"{video}.mp4", video)
    mine = tmp_path / "data" / "msrvtt" / "MSRVTT_JSFUSION_test.csv"
    write(mine, "video_id,sentence\nvideo9,mine\n")
    with pytest.raises(ImportFailed, match=r"MSRVTT_JSFUSION_test\.csv already exists with different content"):
        bring("msrvtt", held, tmp_path / "data")
    assert [path.name for path in mine.parent.iterdir()] == [mine.name]
    mine.unlink()
    other = tmp_path / "data" / "msrvtt" / "videos" / "video1.mp4"
    write(other, "another video")
    with pytest.raises(ImportFailed, match=r"videos/video1\.mp4 already exists and is not"):
        bring("msrvtt", held, tmp_path / "data")
    assert other.read_text() == "another video"
    write(other, "vid301")  # of the same size
    with pytest.raises(ImportFailed, match=r"videos/video1\.mp4 already exists and is not"):
        bring("msrvtt", held, tmp_path / "data")


def test_a_folder_of_no_layout_or_of_several_is_refused_and_a_synthetic_one_stays_marked(msrvtt, tmp_path):
    held, out = hub(tmp_path / "hub", CLIPS), tmp_path / "data"
    for file in ("MSRVTT_data.json", "MSRVTT_train.9k.csv", "MSRVTT_JSFUSION_test.csv"):
        (held / file).symlink_to(msrvtt / "msrvtt" / file)
    several = r"contains several layouts of MSR-VTT: hub in .* and clip4clip in .*Choose one"
    with pytest.raises(ImportFailed, match=several):
        bring("msrvtt", held, out)
    for name in ("train", "test"):
        write(tmp_path / "held" / f"msvd_{name}.json", [])
    missing = r"No supported MSVD layout found.*Missing files: for hub msvd_val\.json; for"
    with pytest.raises(ImportFailed, match=missing):
        bring("msvd", tmp_path / "held", out)
    with pytest.raises(ImportFailed, match="is not a folder"):
        bring("msvd", tmp_path / "gone", out)
    with pytest.raises(ImportFailed, match=r"MSVD has no layout 'hup'\. Available: hub, clip4clip, official"):
        bring("msvd", tmp_path / "held", out, layout="hup")
    assert not out.exists()
    assert bring("msrvtt", held, out, layout="hub").splits["9k", "train"] == (2, 4)
    assert "SYNTHETIC.txt" in bring("msrvtt", msrvtt / "msrvtt", tmp_path / "other").written
    assert MSRVTT(root=str(tmp_path / "other")).warnings == [SYNTHETIC]
    assert LAYOUTS.keys() == PUBLISHED.keys() == DATASETS.keys()
    for dataset, kind in DATASETS.items():
        for options, _ in PUBLISHED[dataset]:
            kind(root="anywhere", **options)


@pytest.mark.parametrize(
    ("test", "sentence"),
    [
        ([{"video_id": "video2", "caption": ["a", "b"]}], r"test_1k\.json: video2: 2 captions, but the protocol"),
        ([{"video_id": "video2"}], r"msrvtt_test_1k\.json: \[0\]: the key 'caption' is missing, found \['video_id'\]"),
        ([{"video_id": "video2", "caption": " "}], r"hub/MSRVTT_JSFUSION_test\.csv: video2.*: the caption is empty"),
        ({"video2": "a"}, r"msrvtt_test_1k\.json: top level: expected list, found dict"),
    ],
)
def test_lists_that_contradict_themselves_are_refused_and_nothing_is_written(tmp_path, test, sentence):
    held = hub(tmp_path / "hub", CLIPS)
    write(held / "msrvtt_test_1k.json", test)
    with pytest.raises(ValueError, match=sentence):
        bring("msrvtt", held, tmp_path / "data")
    assert not (tmp_path / "data").exists()


REPOSITORY = "friedrichor/MSVD"
ARCHIVE = "MSVD_Videos.zip"


@pytest.fixture
def kept(tmp_path) -> Path:
    """What the stand-in keeps: an MSVD of a video per split, its archive, and files that nobody asks for."""
    folder = tmp_path / "kept"
    for i, name in enumerate(("train", "val", "test")):
        row = {"video_id": f"clip_{i}_2", "video": f"clip_{i}_2.avi", "caption": ["a dog", "a cat"], "source": "MSVD"}
        write(folder / f"msvd_{name}.json", [row])
    zipped(folder / ARCHIVE, [f"clip_{i}_2.avi" for i in range(3)])
    write(folder / "README.md", "a card")
    return folder


def downloads(hub, name: str) -> list[str | None]:
    return [part for method, path, part in hub.asked if method == "GET" and path.endswith(name)]


def test_what_the_hub_keeps_is_fetched_once_and_imported(kept, tmp_path):
    with serving(REPOSITORY, kept) as hub:
        files = fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert {file.name for file in files} == {path.name for path in kept.iterdir()} - {"README.md"}
        assert all(file.read_bytes() == (kept / file.name).read_bytes() for file in files)
        hub.asked.clear()
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert downloads(hub, ARCHIVE) == downloads(hub, "msvd_val.json") == []
        annotations = fetch("msvd", tmp_path / "other", annotations_only=True, endpoint=hub.address)
        assert {file.suffix for file in annotations} == {".json"}
    done = import_dataset("msvd", tmp_path / "got", tmp_path / "data", progress=False)
    assert done.splits == {("", name): (1, 2) for name in ("train", "val", "test")}
    assert (done.new, done.absent) == (3, [])


def test_a_connection_that_breaks_off_is_taken_up_where_it_was(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    with serving(REPOSITORY, kept) as hub:
        hub.breaks_once.add(ARCHIVE)
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert (tmp_path / "got" / ARCHIVE).read_bytes() == (kept / ARCHIVE).read_bytes()
        first, second = downloads(hub, ARCHIVE)
    assert first is None
    assert int(str(second).removeprefix("bytes=").rstrip("-")) > 10_000


def test_a_failed_fetch_is_a_sentence_and_the_same_call_goes_on(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serving(REPOSITORY, kept) as hub:
        hub.breaks_off.add("msvd_val.json")
        with pytest.raises(ImportFailed, match=r"friedrichor/MSVD could not be downloaded from http://127\.0\.0\.1"):
            fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert not (tmp_path / "got" / "msvd_val.json").exists()
        hub.breaks_off.clear()
        hub.asked.clear()
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert downloads(hub, ARCHIVE) == []  # it was whole
        assert len(downloads(hub, "msvd_val.json")) == 1


def test_without_a_network_or_a_repository_there_is_one_sentence(kept, tmp_path):
    with pytest.raises(ImportFailed, match=r"could not be downloaded from http://127\.0\.0\.1:9 \(.*docs/datasets\.md"):
        fetch("msvd", tmp_path / "got", endpoint="http://127.0.0.1:9")
    only = "lsmdc cannot be downloaded from the Hub, only msrvtt, msvd, didemo, activitynet"
    with pytest.raises(ImportFailed, match=only):
        fetch("lsmdc", tmp_path / "got")
    gone = "friedrichor/MSVD on the Hub is no longer public"
    with serving("somebody/else", kept) as hub, pytest.raises(ImportFailed, match=gone):
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
    with serving(REPOSITORY, kept) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10})())
        with pytest.raises(ImportFailed, match=r"has 0\.0 GB of free space, but .* are needed"):
            fetch("msvd", tmp_path / "got", endpoint=hub.address)
    assert not [path for path in (tmp_path / "got").rglob("*") if path.is_file()]


def test_the_command_asks_the_hub_of_the_environment_and_names_the_next_step(kept, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with serving(REPOSITORY, kept) as hub:  # huggingface_hub takes both from HF_ENDPOINT when it is imported
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        assert main(["data", "download", "msvd", "--out=got"]) == 0
    assert "4 files (0.00 GB) are in got. Next: tvr data import msvd --from got" in capsys.readouterr().out


def test_two_videos_of_one_name_must_be_equal(tmp_path):
    held = hub(tmp_path / "hub", CLIPS)
    for folder in ("first", "second"):
        for video in CLIPS:
            write(held / folder / f"{video}.mp4", video)
    write(held / "second" / "video1.mp4", "videoX")  # of the same size
    with pytest.raises(ImportFailed, match=r"first/video1\.mp4 and .*second/video1\.mp4 have the same name but differ"):
        bring("msrvtt", held, tmp_path / "data")
    write(held / "second" / "video1.mp4", "video1")
    assert bring("msrvtt", held, tmp_path / "data").new == 4
