"""Captioning with a tiny model of the real class: files, interruptions, full disks, and refused input."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import av
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from child_processes import fork
from tiny_transformers import WORDS, save_tiny_captioner

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.data.recover_captions import SCHEMA, Description, read_captions
from tvr_lightning.encoders.captioner import (
    CaptionOptions,
    by_video,
    caption,
    finish_captions,
    load_captioner,
    open_captions,
)
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.errors import UserError
from tvr_lightning.media.video import probe

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
SETTINGS = {"model": "somebody", "prompt": "What is seen?", "weights_hash": "0123456789abcdef", "segments": 2}
SETTINGS["reading"] = "one frame of 28 pixels, 3 tokens"
SAID = {*WORDS, "user", "assistant"}
QUICK = {"segments": 3, "frames": 2, "image_size": 56, "max_new_tokens": 5, "num_workers": 0, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_captioner(tmp_path_factory.mktemp("captioner"))


@pytest.fixture(scope="module")
def captioner(folder):
    return load_captioner(str(folder), "cpu")


@pytest.fixture(scope="module")
def videos(msrvtt):
    return [VideoRecord(path.stem, path) for path in sorted((msrvtt / "msrvtt" / "videos").iterdir())[:5]]


@pytest.fixture(scope="module")
def table(captioner, videos, tmp_path_factory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("out") / "captions.parquet"
    caption(videos, captioner, CaptionOptions(out, batch_size=6, **QUICK))
    return pd.read_parquet(out)


def test_every_segment_has_a_span_a_caption_and_its_provenance(table, videos, captioner, folder):
    assert list(table.columns) == SCHEMA.names
    assert table["video_id"].tolist() == [video.video_id for video in videos for _ in range(3)]
    assert table["segment"].tolist() == [0, 1, 2] * len(videos)
    for video in videos:
        rows = table[table["video_id"] == video.video_id]
        assert rows["start"].tolist()[0] == 0.0
        assert rows["end"].tolist()[-1] == pytest.approx(probe(video.path).duration)
        assert rows["start"].tolist()[1:] == rows["end"].tolist()[:-1]
    assert set(table["model"]) == {str(folder)}
    assert set(table["weights_hash"]) == {captioner.weights_hash}
    assert table["prompt"].nunique() == 1
    assert set() < {word for text in table["caption"] for word in text.split()} <= SAID
    assert table["caption"].nunique() > 1


def test_batches_and_bfloat16_give_descriptions(captioner, folder):
    frames = torch.zeros(3, 2, 3, 56, 56, dtype=torch.uint8)
    for channel in range(3):
        frames[channel, :, channel] = 255
    together = captioner.describe(frames, "a red circle", 6)
    assert together == [captioner.describe(frames[i : i + 1], "a red circle", 6)[0] for i in range(3)]
    assert len(set(together)) > 1
    assert captioner.describe(frames, "on the green star", 6) != together
    assert all(len(text.split()) <= 2 for text in captioner.describe(frames, "a red circle", 2))
    halved = load_captioner(str(folder), "cpu")
    halved.model.to(torch.bfloat16)  # as on a GPU
    assert {word for text in halved.describe(frames, "a red circle", 6) for word in text.split()} <= SAID


def die(target: object, function: str, number: int, after: bool, action, *arguments) -> None:
    """Do something until this process kills itself before or after the call of a function with this number."""
    call, calls = getattr(target, function), itertools.count(1)

    def killing(*given, **options):
        fatal = next(calls) == number
        result = call(*given, **options) if after or not fatal else None
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(target, function, killing)
    action(*arguments)


def test_a_killed_run_resumes_and_writes_the_same_file(table, videos, captioner, tmp_path, ended):
    out = tmp_path / "captions.parquet"
    options = CaptionOptions(out, batch_size=6, **QUICK)
    process = ended(fork(die, captioner, "describe", 2, False, caption, videos, captioner, options))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    unfinished = out.with_name(out.name + ".unfinished")
    with unfinished.open("ab") as file:
        file.write(b'[{"video_id": "video')  # a truncated line
    report = caption(videos, captioner, options)
    assert report == ["3 videos described, 2 already present"]
    pd.testing.assert_frame_equal(pd.read_parquet(out), table)
    assert {path.name for path in tmp_path.iterdir()} <= {out.name, f"{unfinished.name}.lock"}


def write_descriptions(out: Path, names: list[str]) -> list[str]:
    """Describe the videos that are missing in the file, as a run does; return their IDs."""
    with open_captions(out, SETTINGS) as (journal, rows):
        missing = [name for name in names if name not in rows]
        for name in missing:
            segments = [Description(name, number, number, number + 1.0, f"{name} {number}") for number in range(2)]
            journal.append([dataclasses.asdict(segment) for segment in segments])
            rows |= by_video(journal.entries[-1])
        finish_captions(out, journal, rows, names)
    return missing


def test_a_kill_while_the_file_is_written_loses_nothing(tmp_path, ended):
    first, names, finished = ["old", "other"], ["a", "b", "old"], []
    right = tmp_path / "right" / "captions.parquet"
    write_descriptions(right, first)
    write_descriptions(right, names)
    assert len(read_captions(right).descriptions) == 4
    for target, function in ((pq, "write_table"), (Path, "unlink")):
        for after in (False, True):
            out = tmp_path / f"{function} {after}" / "captions.parquet"
            write_descriptions(out, first)
            process = ended(fork(die, target, function, 1, after, write_descriptions, out, names))
            process.join()
            assert process.exitcode == -signal.SIGKILL
            finished.append(out.read_bytes() == right.read_bytes())
            assert write_descriptions(out, names) == [], "existing descriptions are not computed again"
            assert out.read_bytes() == right.read_bytes()
            assert {path.name for path in out.parent.iterdir()} == {path.name for path in right.parent.iterdir()}
    assert finished == [False, False, True, True]


def test_a_full_disk_loses_nothing(tmp_path, limit_files):
    names = [f"video{number}" for number in range(6)]
    right = tmp_path / "right" / "captions.parquet"
    write_descriptions(right, names)
    left = []
    for limit in range(0, right.stat().st_size, 331):
        out = tmp_path / str(limit) / "captions.parquet"
        limit_files(limit)
        with pytest.raises(UserError, match=r"cannot be written: File too large\. .* file size limit"):
            write_descriptions(out, names)
        limit_files()
        assert not out.exists()
        left.append(len(write_descriptions(out, names)))
        assert out.read_bytes() == right.read_bytes()
    assert left == sorted(left, reverse=True)
    assert set(left) >= {6, 4, 0}, "limits reached in the first line of the journal, in its middle, and in the file"


def test_a_finished_file_is_extended_or_refused(captioner, videos, tmp_path):
    out = tmp_path / "captions.parquet"
    options = CaptionOptions(out, **QUICK)
    caption(videos[:1], captioner, options)
    before = pd.read_parquet(out)
    assert caption(videos[:2], captioner, options) == ["1 videos described, 1 already present"]
    pd.testing.assert_frame_equal(pd.read_parquet(out).iloc[:3], before)
    assert len(pd.read_parquet(out)) == 6
    for change, named in (({"prompt": "a star"}, "prompt"), ({"segments": 2}, "segments"), ({"frames": 1}, "reading")):
        with pytest.raises(UserError, match=rf"{out}.*made with {named}"):
            caption(videos[:3], captioner, CaptionOptions(out, **(QUICK | change)))
    pd.DataFrame({"video_id": ["video0"], "caption": ["a star"]}).to_parquet(out)
    written = out.read_bytes()
    with pytest.raises(UserError, match="not written by a captioner"):
        caption(videos[:1], captioner, options)
    assert out.read_bytes() == written
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match="check its permissions"):
        write_descriptions(tmp_path / "taken" / "captions.parquet", ["a"])


def test_a_replaced_file_is_described_again_and_a_copy_is_not(table, captioner, videos, tmp_path):
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "c.parquet"
    captions = table.groupby("video_id")["caption"].agg(list)
    captions = [captions[video.video_id] for video in videos]
    assert captions[1] != captions[2]

    def run(folder, names, **sources):
        """Describe videos, after copying some files to them by their number; return the report and the captions."""
        folder.mkdir(exist_ok=True)
        for name, number in sources.items():
            shutil.copy(videos[number].path, folder / f"{name}.mp4")
        listed = [VideoRecord(name, folder / f"{name}.mp4") for name in names]
        report = caption(listed, captioner, CaptionOptions(out, **QUICK))
        return report, pd.read_parquet(out).groupby("video_id")["caption"].agg(list).to_dict()

    run(first, ["equal", "other"], equal=0, other=1)
    report, found = run(second, ["equal", "other"], equal=0, other=2)
    assert report[0] == "1 videos described, 1 already present"
    assert "other" in report[1]
    assert found == {"equal": captions[0], "other": captions[2]}
    _, found = run(second, ["other"], other=1)  # the same path, another video
    assert found == {"equal": captions[0], "other": captions[1]}
    (second / "other.mp4").unlink()
    assert run(second, ["other"])[0] == ["0 videos described, 1 already present"]
    (second / "other.mp4").write_bytes(b"no video")
    assert list(run(second, ["other"])[1]) == ["equal"], "other videos stay"


def test_unreadable_videos_are_skipped_and_others_opened_once(captioner, videos, tmp_path, monkeypatch):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    clip = dataclasses.replace(videos[0], span=(1.0, 4.0))
    listed = [clip, VideoRecord("broken", broken), VideoRecord("gone", tmp_path / "gone.mp4")]
    opened, open_av = [], av.open
    monkeypatch.setattr(av, "open", lambda file, *rest, **more: opened.append(file) or open_av(file, *rest, **more))
    report = caption(listed, captioner, CaptionOptions(tmp_path / "c.parquet", **QUICK))
    assert report[0] == "1 videos described, 0 already present"
    skipped = [line for line in report if line.startswith("skipped:")]
    assert len(skipped) == 2
    assert str(broken) in skipped[0]
    assert opened.count(f"file:{clip.path}") == 1
    table = pd.read_parquet(tmp_path / "c.parquet")
    assert set(table["video_id"]) == {clip.video_id}
    assert list(zip(table["start"], table["end"], strict=True)) == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]


def test_the_command_describes_the_training_videos_of_a_recipe(msrvtt, folder, tmp_path, capsys):
    out, recipe = tmp_path / "captions.parquet", tmp_path / "data.yaml"
    # The recipe may name the file that is to be written.
    options = {"root": str(msrvtt), "extra_captions": str(out), "num_workers": 0, "max_train_videos": 3}
    recipe.write_text(json.dumps({"data": {"init_args": options}}))
    quick = ["--segments=2", "--frames=1", "--image_size=28", "--max_new_tokens=3", "--num_workers=0", "--device=cpu"]
    command = ["caption", "--config=data/msrvtt", f"--config={recipe}", f"--out={out}", *quick]
    assert main([*command, f"--model={folder}"]) == 0
    assert f"Wrote {out}" in capsys.readouterr().out.replace("\n", "")
    train = MSRVTT(root=str(msrvtt), max_train_videos=3).read_split("train")
    assert list(read_captions(out).descriptions) == sorted(video.video_id for video in train.videos)
    assert main([*command, "--model=nowhere"]) == 2
    assert "has no weights: looked in" in capsys.readouterr().err


def test_the_hash_depends_on_weights_and_processor(folder, captioner, tmp_path):
    other = load_captioner(str(folder), "cpu")
    with torch.no_grad():
        next(other.model.parameters()).add_(1e-3)
    hashes = [captioner.weights_hash, type(other)(other.model, other.processor, other.name).weights_hash]
    copy = shutil.copytree(folder, tmp_path / "model")
    assert load_captioner(str(copy), "cpu").weights_hash == captioner.weights_hash
    for name, old, new in (
        ("chat_template.jinja", "assistant", "star"),
        ("tokenizer.json", "Whitespace", "WhitespaceSplit"),
        ("generation_config.json", "{", '{"repetition_penalty": 1.5,'),
    ):
        content = (copy / name).read_text(encoding="utf-8")
        assert old in content
        (copy / name).write_text(content.replace(old, new, 1), encoding="utf-8")
        hashes.append(load_captioner(str(copy), "cpu").weights_hash)
    assert len(set(hashes)) == 5


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "nowhere/of/ours", "folder"])
def test_missing_weights_are_reported_with_alternatives(model, folder, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if model == "folder":
        (tmp_path / model).mkdir()
        shutil.copy(folder / "config.json", tmp_path / model)
    with pytest.raises(MissingWeightsError, match=r"model\.safetensors" if model == "folder" else model) as raised:
        load_captioner(model, "cpu")
    message = str(raised.value)
    assert model == "folder" or ("hf download" in message) == (model.count("/") == 1)
    assert all(part in message for part in (str(tmp_path), *SCHEMA.names))


def test_damaged_files_are_named(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[: len(content) // 2] if name.startswith("model") else b"[]")
        with pytest.raises(UserError, match=f"^{copy} cannot be loaded as an image-text-to-text model .*$"):
            load_captioner(str(copy), "cpu")
        (copy / name).write_bytes(content)
    out = tmp_path / "captions.parquet"
    for content in (b"", b"PAR1" + bytes(100) + b"PAR1"):
        out.write_bytes(content)
        with pytest.raises(UserError, match=rf"^{out} is damaged \(.*\)\. Delete it, or choose .*$"):
            write_descriptions(out, ["a"])


def test_a_processor_without_a_chat_template_is_refused(tmp_path):
    with pytest.raises(UserError, match="no chat template"):
        load_captioner(str(save_tiny_captioner(tmp_path, template=None)), "cpu")


@pytest.mark.parametrize("change", [{"segments": 0}, {"num_workers": -1}, {"prompt": " "}, {"out": Path("a.csv")}])
def test_invalid_options_are_refused(tmp_path, change):
    (option,) = change
    with pytest.raises(ValueError, match=f"{option} is"):
        CaptionOptions(**({"out": tmp_path / "c.parquet"} | QUICK | change))
