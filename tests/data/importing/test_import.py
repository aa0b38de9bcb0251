"""Import of common dataset layouts: recognized, converted to the expected layout, or refused."""

import json
import pickle
import re
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest
from hub_stand_in import serving

from tvr_lightning.cli import main
from tvr_lightning.data import LSMDC, MSRVTT, MSVD, VATEX, ActivityNet, DiDeMo, TextVideoDataModule
from tvr_lightning.data.importing.hub import fetch
from tvr_lightning.data.importing.layouts import DATASETS, LAYOUTS, PUBLISHED
from tvr_lightning.data.importing.run import import_dataset
from tvr_lightning.data.records import SYNTHETIC, SYNTHETIC_FILE
from tvr_lightning.data.video_files import stem
from tvr_lightning.errors import UserError


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def write_hub_lists(folder: Path, official: TextVideoDataModule, lists: dict[str, str]) -> None:
    """Write splits of a dataset as lists of the Hub, by their names."""
    for name, part in lists.items():
        split, rows = official.read_split(part), []
        for video, texts in zip(split.videos, split.texts_of_videos(), strict=True):
            captions = [split.texts[i].text for i in texts]
            row = {"video": f"{part}/{video.video_id}.mp4", "caption": captions[0] if len(captions) == 1 else captions}
            if not isinstance(official, DiDeMo | LSMDC):
                row["video_id"] = stem(video.video_id)
            if isinstance(official, ActivityNet):
                row |= {"sentences": captions, "caption": "unused"}
            rows.append(row)
        write(folder / f"{name}.json", rows)


def assert_same(found, expected, *splits: str) -> None:
    for name in splits:
        one, other = found.read_split(name), expected.read_split(name)
        assert [stem(video.video_id) for video in one.videos] == [stem(video.video_id) for video in other.videos]
        assert (one.texts, one.protocol) == (other.texts, other.protocol)


def test_the_hubs_msrvtt_has_the_splits_of_the_official_files(msrvtt, tmp_path):
    source, names = tmp_path / "hub", ("9k", "7k")
    official = {name: MSRVTT(root=str(msrvtt), split=name) for name in names}
    for name in names:
        write_hub_lists(source, official[name], {f"msrvtt_train_{name}": "train", "msrvtt_test_1k": "test"})
    report = import_dataset("msrvtt", source, tmp_path / "data")
    for name in names:
        assert_same(MSRVTT(root=str(tmp_path / "data"), split=name), official[name], "train", "test")
    assert report.splits["9k", "train"] == (12, 240)
    assert [line.rpartition(" has ")[2] for line in report.differences] == ["9,000", "1,000", "7,010", "1,000"]
    assert len(report.absent) == 16


@pytest.mark.parametrize(
    ("kind", "lists", "differences"),  # a list whose split the test data lacks contains another split
    [
        (MSVD, {f"msvd_{name}": name for name in ("train", "val", "test")},
         ["train has 2 videos, but the protocol has 1,200", "val has 2 videos, but the protocol has 100",
          "test has 4 videos, but the protocol has 670"]),
        (DiDeMo, {"didemo_train": "val", "didemo_test": "test"},
         ["hub, train has 1,065 videos, but the protocol has 8,392"]),
        (ActivityNet, {"activitynet_captions_train": "test", "activitynet_captions_val1": "test"},
         ["train has 4,917 videos, but the protocol has 10,009"]),
        (VATEX, {"vatex_train": "val", "vatex_val": "val", "vatex_test": "test"},
         ["train has 1,500 videos, but the protocol has 25,991"]),
        (LSMDC, {"lsmdc_ret_train": "test", "lsmdc_ret_val": "test", "lsmdc_ret_test_1000": "test"}, []),
    ],
)  # fmt: skip
def test_lists_of_the_hub_have_the_splits_of_the_official_files(
    test_data, real_vatex, synthetic, tmp_path, kind, lists, differences
):
    roots = {VATEX: real_vatex, MSVD: synthetic("msvd", 8)}
    real = kind(root=str(roots.get(kind, test_data / "annotations")))
    write_hub_lists(tmp_path / "hub", real, lists)
    report = import_dataset(kind.directory, tmp_path / "hub", tmp_path / "data")
    data = kind(root=str(tmp_path / "data"), **({"split": "hub"} if kind is DiDeMo else {}))
    assert report.differences == differences
    for name, part in zip(data.official_splits, lists.values(), strict=True):
        found, expected = data.read_split(name), real.read_split(part)
        assert [stem(video.video_id) for video in found.videos] == [stem(video.video_id) for video in expected.videos]
        assert found.texts == expected.texts


def test_clip4clips_and_the_official_msrvtt_are_found_in_subfolders(msrvtt, tmp_path, capsys):
    real, source, root = msrvtt / "msrvtt", tmp_path / "MSRVTT", tmp_path / "data"
    files = ("MSRVTT_data.json", "MSRVTT_train.9k.csv", "MSRVTT_JSFUSION_test.csv", SYNTHETIC_FILE)
    for folder in ("msrvtt_data", "videos/all"):
        (source / folder).mkdir(parents=True)
    for file in files:
        (source / "msrvtt_data" / file).symlink_to(real / file)
    for number in range(1, 16):
        (source / "videos" / "all" / f"video{number}.mp4").symlink_to(real / "videos" / f"video{number}.mp4")
    assert main(["data", "import", "msrvtt", f"--from={source}", f"--root={root}"]) == 1
    shown = capsys.readouterr().out
    assert "MSR-VTT in the clip4clip layout" in shown
    assert "9k, train: 12 videos, 240 texts" in shown
    assert "Captions without videos: 1, video0" in shown
    assert "4 annotation files and 15 videos are new" in shown
    assert all((root / "msrvtt" / file).read_bytes() == (real / file).read_bytes() for file in files)
    assert MSRVTT(root=str(root)).warnings == [SYNTHETIC]

    data = json.loads((real / "MSRVTT_data.json").read_text())
    train_val = {video["video_id"] for video in data["videos"] if video["split"] != "test"}
    for file, mine in (("train_val_videodatainfo.json", True), ("test_videodatainfo.json", False)):
        part = {k: [one for one in data[k] if (one["video_id"] in train_val) is mine] for k in ("videos", "sentences")}
        write(tmp_path / "official" / file, part)
    report = import_dataset("msrvtt", tmp_path / "official", tmp_path / "other")
    assert_same(
        *(MSRVTT(root=str(path), split="full") for path in (tmp_path / "other", msrvtt)), "train", "val", "test"
    )
    assert any("not the 1k-A pairs" in line for line in report.lines())


def test_official_msvd_and_didemo_files_are_converted(test_data, synthetic, tmp_path):
    real, source = synthetic("msvd", 8), tmp_path / "raw"
    tokens = pickle.loads((real / "msvd" / "raw-captions.pkl").read_bytes())
    rows = [f"{clip} {' '.join(words)}\n" for clip, captions in tokens.items() for words in captions]
    write(source / "AllVideoDescriptions.txt", "".join(["# a comment\n\n", *rows]))
    for name in ("train", "val", "test"):
        (source / f"{name}_list.txt").symlink_to(real / "msvd" / f"{name}_list.txt")
    assert "keep punctuation" in import_dataset("msvd", source, tmp_path / "data").differences[0]
    assert_same(MSVD(root=str(tmp_path / "data")), MSVD(root=str(real)), "train", "val", "test")

    source = tmp_path / "moments"
    write(source / "train_data.json", [{"video": "1@N_a.mov", "description": "a dog"}])
    for name in ("val", "test"):
        (source / f"{name}_data.json").symlink_to(test_data / "annotations" / "didemo" / f"{name}_data.json")
    report = import_dataset("didemo", source, tmp_path / "data")
    assert report.splits["lists", "test"] == (1037, 1037)
    assert "lists, test has 1,037 videos, but the protocol has 1,004" in report.differences


def hub(folder: Path, count: int = 4) -> Path:
    """Write lists of an MSR-VTT in the Hub's layout: two training videos and `count - 2` test videos."""
    row = lambda i, caption: {"video_id": f"video{i}", "video": f"video{i}.mp4", "caption": caption}  # noqa: E731
    write(folder / "msrvtt_train_9k.json", [row(i, [f"caption {i}", "again"]) for i in range(2)])
    write(folder / "msrvtt_test_1k.json", [row(i, f"caption {i}") for i in range(2, count)])
    return folder


VIDEOS = [f"video{i}.mp4" for i in range(4)]


def zipped(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("video/", "")
        for name in names:
            archive.writestr(f"video/{name}", name.encode() * 1000)
        archive.writestr("video/readme.txt", "not a video")
    return path


def imported(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "msrvtt" / "videos").iterdir()}


def test_a_zip_is_unpacked_and_completed(tmp_path):
    source = hub(tmp_path / "hub")
    zipped(source / "MSRVTT_Videos.zip", [*VIDEOS, "video9.mp4"])
    report = import_dataset("msrvtt", source, tmp_path)
    assert (report.new, report.present, report.unused, report.absent) == (4, 0, ["video9"], [])
    assert imported(tmp_path)["video2.mp4"] == b"video2.mp4" * 1000
    (tmp_path / "msrvtt" / "videos" / "video1.mp4").unlink()
    again = import_dataset("msrvtt", source, tmp_path)
    assert (again.new, again.present, again.written) == (1, 3, [])
    data = MSRVTT(root=str(tmp_path))
    data.setup()
    assert [text.text for text in data.read_split("test").texts] == ["caption 2", "caption 3"]
    assert (data.full_title, data.warnings) == ("MSR-VTT", [])


def tar_parts(tmp_path, numbers):
    """Write twelve videos as a tar in as many parts as there are numbers; return the folder and the videos' bytes."""
    source, loose = hub(tmp_path / "hub", 12), tmp_path / "loose"
    for i in range(12):
        write(loose / f"video{i}.mp4", f"{i:>9}" * 3000)
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        archive.add(loose, "Videos")
    content = (tmp_path / "whole.tar").read_bytes()
    size = -(-len(content) // len(numbers) // 512) * 512
    for i, number in enumerate(numbers):
        (source / f"Videos.tar.part{number}").write_bytes(content[i * size : (i + 1) * size])
    return source, {path.name: path.read_bytes() for path in loose.iterdir()}


@pytest.mark.parametrize("numbers", [["-000", "-001", "-002"], range(1, 13), ["aa", "ab", "ac"]])
def test_parts_of_a_tar_are_joined_in_natural_order(tmp_path, numbers):
    source, videos = tar_parts(tmp_path, numbers)
    assert import_dataset("msrvtt", source, tmp_path / "data").new == 12
    assert imported(tmp_path / "data") == videos


def test_nothing_is_unpacked_from_damaged_parts_of_a_tar(tmp_path):
    source, videos = tar_parts(tmp_path, range(12))
    whole = {path: path.read_bytes() for path in source.glob("Videos.tar.part*")}
    second, ninth, eleventh = (source / f"Videos.tar.part{number}" for number in (2, 9, 11))
    for changes, message in (
        ({second: whole[ninth], ninth: whole[second]}, r"Videos\.tar\.part0 is truncated or damaged"),
        ({second: None}, r"Videos\.tar: part 2 is missing"),
        ({eleventh: None}, r"part0 is truncated or damaged \(unexpected end of data\)"),
    ):
        for path, content in changes.items():
            path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            import_dataset("msrvtt", source, tmp_path / "data")
        for path in changes:
            path.write_bytes(whole[path])
    assert not list((tmp_path / "data").rglob("*.writing"))
    assert not import_dataset("msrvtt", source, tmp_path / "data").absent
    assert imported(tmp_path / "data") == videos


def with_header(offset: int, value: int, content: bytes) -> bytes:
    """Change a byte in both headers of every member of a zip archive."""
    data = bytearray(content)
    for signature, start in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        position = -1
        while (position := data.find(signature, position + 1)) >= 0:
            data[position + start + offset] |= value
    return bytes(data)


BROKEN = r"MSRVTT_Videos\.zip is truncated or damaged \(.*Download it again and rerun the command\."


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], BROKEN),
        (lambda data: data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :], BROKEN),
        (partial(with_header, 0, 1), r"Videos\.zip: File .* is encrypted.*\. Unpack it, and import the folder"),
        (partial(with_header, 2, 9), r"Videos\.zip: That compression method is not supported\. Unpack it"),  # Deflate64
        (None, r"File too large\. Imported videos are kept\. To resume, free disk space, or check"),
    ],
)
def test_an_import_resumes_after_a_broken_zip_or_a_full_disk(tmp_path, capsys, limit_files, damage, message):
    source = hub(tmp_path / "hub")
    file = zipped(source / "MSRVTT_Videos.zip", VIDEOS)
    content = file.read_bytes()
    if damage is None:
        limit_files(9_999)  # a video has 10,000 bytes
    else:
        file.write_bytes(damage(content))
    command = ["data", "import", "msrvtt", f"--from={source}", f"--root={tmp_path}"]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"tvr: .*{message}", line)
    limit_files()
    file.write_bytes(content)
    assert main(command) == 0
    assert len(imported(tmp_path)) == 4


def test_links_to_a_moved_folder_are_repaired(tmp_path):
    source, videos = hub(tmp_path / "hub"), tmp_path / "msrvtt" / "videos"
    for name in VIDEOS:
        write(source / "video" / name, name)
    assert import_dataset("msrvtt", source, tmp_path).new == 4
    assert all(path.is_symlink() for path in videos.iterdir())
    moved = source.rename(tmp_path / "moved")
    (moved / "video" / "video3.mp4").unlink()
    again = import_dataset("msrvtt", moved, tmp_path)
    assert (again.new, again.present, again.absent) == (3, 0, ["video3"])
    assert (videos / "video2.mp4").read_text() == "video2.mp4"


def test_captions_without_videos_and_videos_without_captions_are_listed(tmp_path, capsys):
    source = hub(tmp_path / "hub")
    for name in ("video0.mp4", "video2.mp4", "video3.mp4", "holiday.mp4"):
        write(source / "video" / name, name)
    assert main(["data", "import", "msrvtt", f"--from={source}", f"--root={tmp_path}", "--videos=copy"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "Videos without captions, not imported: 1, holiday" in lines
    assert any(line.startswith("Captions without videos: 1, video1. Add") for line in lines)
    assert imported(tmp_path).keys() == {"video0.mp4", "video2.mp4", "video3.mp4"}
    assert not any(path.is_symlink() for path in (tmp_path / "msrvtt" / "videos").iterdir())
    assert (source / "video" / "video0.mp4").is_file()


def test_existing_files_are_not_overwritten(tmp_path):
    source, out = hub(tmp_path / "hub"), tmp_path / "data" / "msrvtt"
    for name in VIDEOS:
        write(source / name, name)
    mine, other, second = out / "MSRVTT_JSFUSION_test.csv", out / "videos" / "video1.mp4", source / "2" / "video1.mp4"
    for file, content, message in (
        (mine, "video_id,sentence\nvideo9,mine\n", r"MSRVTT_JSFUSION_test\.csv already exists with different content"),
        (other, "another video", r"videos/video1\.mp4 already exists and is not"),
        (other, "vid301.mp4", r"videos/video1\.mp4 already exists and is not"),  # of the same size
        (second, "videoX.mp4", r"2/video1\.mp4 and .*hub/video1\.mp4 have the same name but differ"),
    ):
        write(file, content)
        with pytest.raises(UserError, match=message):
            import_dataset("msrvtt", source, tmp_path / "data")
        assert file.read_text() == content
        assert file != mine or [path.name for path in out.iterdir()] == [mine.name]
        file.unlink()
    write(second, "video1.mp4")
    assert import_dataset("msrvtt", source, tmp_path / "data").new == 4


def test_unknown_and_ambiguous_layouts_are_refused(msrvtt, tmp_path):
    source, out, incomplete = hub(tmp_path / "hub"), tmp_path / "data", tmp_path / "incomplete"
    for file in ("MSRVTT_data.json", "MSRVTT_train.9k.csv", "MSRVTT_JSFUSION_test.csv"):
        (source / file).symlink_to(msrvtt / "msrvtt" / file)
    for name in ("train", "test"):
        write(incomplete / f"msvd_{name}.json", [])
    for dataset, folder, options, message in (
        ("msrvtt", source, {}, r"contains several layouts of MSR-VTT: hub in .* and clip4clip in .*Choose one"),
        ("msvd", incomplete, {}, r"No supported MSVD layout found.*Missing files: for hub msvd_val\.json; for"),
        ("msvd", tmp_path / "gone", {}, "is not a folder"),
        ("msvd", incomplete, {"layout": "hup"}, r"no layout 'hup'\. Available: hub, clip4clip, official"),
    ):
        with pytest.raises(UserError, match=message):
            import_dataset(dataset, folder, out, **options)
    assert not out.exists()
    assert import_dataset("msrvtt", source, out, layout="hub").splits["9k", "train"] == (2, 4)
    assert LAYOUTS.keys() == PUBLISHED.keys() == DATASETS.keys()
    for dataset, kind in DATASETS.items():
        for options, _ in PUBLISHED[dataset]:
            kind(root="anywhere", **options)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ([{"video_id": "video2", "caption": ["a", "b"]}], r"test_1k\.json: video2: 2 captions, but the protocol"),
        ([{"video_id": "video2"}], r"msrvtt_test_1k\.json: \[0\]: the key 'caption' is missing, found \['video_id'\]"),
        ([{"video_id": "video2", "caption": " "}], r"hub/MSRVTT_JSFUSION_test\.csv: video2.*: the caption is empty"),
        ({"video2": "a"}, r"msrvtt_test_1k\.json: top level: expected list, found dict"),
    ],
)
def test_bad_lists_are_refused_and_nothing_is_written(tmp_path, test, message):
    source = hub(tmp_path / "hub")
    write(source / "msrvtt_test_1k.json", test)
    with pytest.raises(ValueError, match=message):
        import_dataset("msrvtt", source, tmp_path / "data")
    assert not (tmp_path / "data").exists()


REPOSITORY, ARCHIVE = "friedrichor/MSVD", "MSVD_Videos.zip"


@pytest.fixture
def repository(tmp_path):
    """Files of a repository on the Hub: an MSVD with one video per split, its archive, and a README."""
    folder = tmp_path / "repository"
    for i, name in enumerate(("train", "val", "test")):
        row = {"video_id": f"clip_{i}_2", "video": f"clip_{i}_2.avi", "caption": ["a dog", "a cat"], "source": "MSVD"}
        write(folder / f"msvd_{name}.json", [row])
    zipped(folder / ARCHIVE, [f"clip_{i}_2.avi" for i in range(3)])
    write(folder / "README.md", "a card")
    return folder


def downloads(hub, name: str) -> list[str | None]:
    return [part for method, path, part in hub.asked if method == "GET" and path.endswith(name)]


def test_a_repository_is_downloaded_once_and_imported(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with serving(REPOSITORY, repository) as hub:  # huggingface_hub reads both from HF_ENDPOINT when it is imported
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        assert main(["data", "download", "msvd", "--out=got"]) == 0
        assert "4 files (0.00 GB) are in got. Next: tvr data import msvd --from got" in capsys.readouterr().out
        hub.asked.clear()
        files = fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert {file.name for file in files} == {path.name for path in repository.iterdir()} - {"README.md"}
        assert all(file.read_bytes() == (repository / file.name).read_bytes() for file in files)
        assert downloads(hub, ARCHIVE) == downloads(hub, "msvd_val.json") == []
        annotations = fetch("msvd", tmp_path / "other", annotations_only=True, endpoint=hub.address)
        assert {file.suffix for file in annotations} == {".json"}
    report = import_dataset("msvd", tmp_path / "got", tmp_path / "data")
    assert report.splits == {("", name): (1, 2) for name in ("train", "val", "test")}
    assert (report.new, report.absent) == (3, [])


def test_an_interrupted_download_resumes(repository, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serving(REPOSITORY, repository) as hub:
        hub.breaks_once.add(ARCHIVE)
        hub.breaks_off.add("msvd_val.json")
        with pytest.raises(UserError, match=r"friedrichor/MSVD could not be downloaded from http://127\.0\.0\.1"):
            fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert not (tmp_path / "got" / "msvd_val.json").exists()
        first, second = downloads(hub, ARCHIVE)
        assert first is None
        assert int(str(second).removeprefix("bytes=").rstrip("-")) > 10_000
        hub.breaks_off.clear()
        hub.asked.clear()
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert downloads(hub, ARCHIVE) == []  # it was complete
        assert len(downloads(hub, "msvd_val.json")) == 1
    assert (tmp_path / "got" / ARCHIVE).read_bytes() == (repository / ARCHIVE).read_bytes()


def test_failed_downloads_are_explained(repository, tmp_path, monkeypatch):
    out = tmp_path / "got"
    with pytest.raises(UserError, match=r"could not be downloaded from http://127\.0\.0\.1:9 \(.*docs/datasets\.md"):
        fetch("msvd", out, endpoint="http://127.0.0.1:9")
    with pytest.raises(UserError, match="lsmdc cannot be downloaded from the Hub, only msrvtt, msvd, didemo, act"):
        fetch("lsmdc", out)
    missing = "friedrichor/MSVD on the Hub is no longer public"
    with serving("somebody/else", repository) as hub, pytest.raises(UserError, match=missing):
        fetch("msvd", out, endpoint=hub.address)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10})())
    full = r"has 0\.0 GB of free space, but .* are needed"
    with serving(REPOSITORY, repository) as hub, pytest.raises(UserError, match=full):
        fetch("msvd", out, endpoint=hub.address)
    assert not [path for path in out.rglob("*") if path.is_file()]
