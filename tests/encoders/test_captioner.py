"""Captioning with a tiny model of the real class: what is written, what a kill leaves, and what is refused."""

import dataclasses
import itertools
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from tiny_captioner import WORDS, save_tiny_captioner

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import data_from_recipe
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.data.recover_captions import SCHEMA, Description, read_captions
from tvr_lightning.encoders.captioner import CaptionJournal, CaptionOptions, caption, load_captioner
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.errors import UserError
from tvr_lightning.media.video import probe
from tvr_lightning.synthetic import synthesize

pytest.importorskip("transformers")
# transformers tells of its own coming changes
pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")  # a spawned process spends its time importing torch
SETTINGS = {"model": "somebody", "prompt": "What is seen?", "weights_hash": "0123456789abcdef", "segments": 2}
SETTINGS["reading"] = "one frame of 28 pixels, 3 tokens"
QUICK = {"segments": 3, "frames": 2, "image_size": 56, "max_new_tokens": 5, "num_workers": 0, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_captioner(tmp_path_factory.mktemp("captioner"))


@pytest.fixture(scope="module")
def captioner(folder):
    return load_captioner(str(folder), "cpu")


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> list[VideoRecord]:
    root = tmp_path_factory.mktemp("described")
    files = synthesize("msrvtt", root, 8, 0, workers=1, progress=False) / "videos"
    return [VideoRecord(path.stem, path) for path in sorted(files.iterdir())[:5]]


@pytest.fixture(scope="module")
def table(captioner, videos, tmp_path_factory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("out") / "captions.parquet"
    caption(videos, captioner, CaptionOptions(out, batch_size=6, **QUICK))
    return pd.read_parquet(out)


def test_every_video_has_its_segments_with_spans_and_where_they_come_from(table, videos, captioner, folder):
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


def test_descriptions_are_the_models_words_about_these_frames(table):
    words = {word for text in table["caption"] for word in text.split()}
    assert words
    assert words <= {*WORDS, "user", "assistant"}
    assert table["caption"].nunique() > 1


def test_a_batch_says_of_each_segment_what_is_said_of_it_alone(captioner):
    frames = torch.zeros(3, 2, 3, 56, 56, dtype=torch.uint8)
    for channel in range(3):
        frames[channel, :, channel] = 255
    together = captioner.describe(frames, "a red circle", 6)
    assert together == [captioner.describe(frames[i : i + 1], "a red circle", 6)[0] for i in range(3)]
    assert len(set(together)) > 1
    assert captioner.describe(frames, "on the green star", 6) != together
    assert all(len(text.split()) <= 2 for text in captioner.describe(frames, "a red circle", 2))


def test_in_bfloat16_as_on_a_gpu_words_come_out_too(folder):
    halved = load_captioner(str(folder), "cpu")
    halved.model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in halved.model.parameters()} == {torch.bfloat16}
    frames = torch.zeros(2, 2, 3, 56, 56, dtype=torch.uint8)
    frames[1] = 255
    said = halved.describe(frames, "a red circle", 6)
    assert len(said) == 2
    assert {word for text in said for word in text.split()} <= {*WORDS, "user", "assistant"}


def test_a_killed_run_goes_on_and_ends_in_the_same_file(table, videos, folder, tmp_path):
    out = tmp_path / "captions.parquet"
    program = (
        "import os, signal, sys\nimport torch\nfrom pathlib import Path\nfrom tvr_lightning.data.records import *\n"
        "from tvr_lightning.encoders import captioner as room\n"
        "torch.set_num_threads(1)\n"
        f"made = room.load_captioner({str(folder)!r}, 'cpu')\n"
        "describe, calls = made.describe, []\n"
        "def killed(*arguments):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return describe(*arguments)\n"
        "made.describe = killed\n"
        "videos = [VideoRecord(Path(p).stem, Path(p)) for p in sys.argv[2:]]\n"
        f"room.caption(videos, made, room.CaptionOptions(Path(sys.argv[1]), batch_size=6, **{QUICK!r}))\n"
    )
    paths = [str(video.path) for video in videos]
    done = subprocess.run([sys.executable, "-c", program, str(out), *paths], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not out.exists()
    unfinished = out.with_name(out.name + ".unfinished")
    with unfinished.open("ab") as file:
        file.write(b'[{"video_id": "video')  # a line that the kill cut
    again = load_captioner(str(folder), "cpu")
    report = caption(videos, again, CaptionOptions(out, batch_size=6, **QUICK))
    assert report == ["3 videos described, 2 already present"]
    pd.testing.assert_frame_equal(pd.read_parquet(out), table)
    assert {path.name for path in tmp_path.iterdir()} <= {out.name, f"{unfinished.name}.lock"}


def write_descriptions(out: Path, names: list[str]) -> list[str]:
    """Describe those of the videos that the file lacks, as a run does; return their ids."""
    with CaptionJournal.open(out, SETTINGS) as journal:
        missing = [name for name in names if name not in journal.descriptions]
        for name in missing:
            journal.add([Description(name, number, number, number + 1.0, f"{name} {number}") for number in range(2)])
        journal.finish(names)
    return missing


def killed_in_finish(out: Path, names: list[str], step: int) -> None:
    """As `write_descriptions`, killed before this step of the package's code below `finish`."""
    steps = iter(range(step))

    def before(frame, event, _):
        code = frame.f_code
        if "tvr_lightning" not in code.co_filename or code.co_name in ("<listcomp>", "<dictcomp>", "_plain"):
            return None
        if event in ("line", "return") and next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return before

    finish = CaptionJournal.finish

    def traced(*arguments):
        sys.settrace(before)
        finish(*arguments)
        sys.settrace(None)

    CaptionJournal.finish = traced
    write_descriptions(out, names)


def test_killed_at_any_step_of_finishing_the_next_run_ends_in_the_right_file(tmp_path, ended):
    first, names = ["old", "other"], ["a", "b", "old"]
    right = tmp_path / "right" / "captions.parquet"
    write_descriptions(right, first)
    write_descriptions(right, names)
    described, finished = [], 0
    for step in itertools.count():
        out = tmp_path / str(step) / "captions.parquet"
        write_descriptions(out, first)
        process = ended(FORK.Process(target=killed_in_finish, args=(out, names, step)))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        read_captions(out)
        finished += out.read_bytes() == right.read_bytes()
        described += write_descriptions(out, names)
        assert out.read_bytes() == right.read_bytes()
        assert {path.name for path in out.parent.iterdir()} == {path.name for path in right.parent.iterdir()}
    assert len(read_captions(right).descriptions) == 4
    assert described == [], "what was described before the kill is not described again"
    assert 0 < finished < step, "kills came before and after the file was whole"


def describe_and_wait(out: Path) -> None:
    with CaptionJournal.open(out, SETTINGS) as journal:
        journal.add([Description("a", number, number, number + 1.0, f"a {number}") for number in range(2)])
        out.with_name("ready").touch()
        time.sleep(600)


def test_two_processes_do_not_write_one_file_and_a_killed_one_frees_it(tmp_path, ended):
    out = tmp_path / "captions.parquet"
    first = ended(FORK.Process(target=describe_and_wait, args=(out,)))
    first.start()
    while not (tmp_path / "ready").exists():
        assert first.is_alive()
        time.sleep(0.01)
    before = out.with_name(out.name + ".unfinished").read_bytes()
    with pytest.raises(UserError, match=r"Another process is writing the captions .*Wait for it"):
        write_descriptions(out, ["a", "b"])
    assert out.with_name(out.name + ".unfinished").read_bytes() == before
    first.kill()
    first.join()
    assert write_descriptions(out, ["a", "b"]) == ["b"]
    assert read_captions(out).descriptions == {name: [f"{name} 0", f"{name} 1"] for name in "ab"}


def write_within(out: Path, names: list[str], limit: int) -> None:
    """As `write_descriptions`, files no longer than this; exits with 3 where the limit is met, saying so."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        write_descriptions(out, names)
    except UserError as error:
        said = re.search(r"cannot be written: File too large\. .* file size limit", str(error))
        os._exit(3 if said else 4)


def test_whatever_meets_a_size_limit_nothing_described_is_lost_and_the_next_run_ends_in_the_right_file(tmp_path, ended):
    names = [f"video{number}" for number in range(6)]
    right = tmp_path / "right" / "captions.parquet"
    write_descriptions(right, names)
    left = []
    for limit in range(0, right.stat().st_size, 173):
        out = tmp_path / str(limit) / "captions.parquet"
        process = ended(FORK.Process(target=write_within, args=(out, names, limit)))
        process.start()
        process.join()
        assert process.exitcode == 3
        assert not out.exists()
        left.append(len(write_descriptions(out, names)))
        assert out.read_bytes() == right.read_bytes()
    assert left == sorted(left, reverse=True)
    assert set(left) >= {6, 3, 0}, "limits were met in the journal's head, in its middle, and in the file itself"


def test_captions_that_cannot_be_written_say_what_stands_in_the_way(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match="check its permissions"):
        write_descriptions(tmp_path / "taken" / "captions.parquet", ["a"])


def test_a_finished_file_is_left_and_grows_with_the_videos(captioner, videos, tmp_path):
    out = tmp_path / "captions.parquet"
    options = CaptionOptions(out, **QUICK)
    caption(videos[:2], captioner, options)
    before = pd.read_parquet(out)
    report = caption(videos[:3], captioner, options)
    assert report == ["1 videos described, 2 already present"]
    pd.testing.assert_frame_equal(pd.read_parquet(out).iloc[:6], before)
    assert len(pd.read_parquet(out)) == 9


@pytest.mark.parametrize(
    ("change", "named"), [({"prompt": "a star"}, "prompt"), ({"segments": 2}, "segments"), ({"frames": 1}, "reading")]
)
def test_descriptions_made_otherwise_are_not_mixed(captioner, videos, tmp_path, change, named):
    out = tmp_path / "captions.parquet"
    caption(videos[:1], captioner, CaptionOptions(out, **QUICK))
    with pytest.raises(UserError, match=f"made with {named}") as raised:
        caption(videos[:2], captioner, CaptionOptions(out, **(QUICK | change)))
    assert str(out) in str(raised.value)


def test_a_file_that_people_wrote_is_left_alone(captioner, videos, tmp_path):
    out = tmp_path / "captions.parquet"
    pd.DataFrame({"video_id": ["video0"], "caption": ["a star"]}).to_parquet(out)
    before = out.read_bytes()
    with pytest.raises(UserError, match="not written by a captioner"):
        caption(videos[:1], captioner, CaptionOptions(out, **QUICK))
    assert out.read_bytes() == before


def test_unreadable_videos_are_named_and_the_others_described(captioner, videos, tmp_path):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    listed = [videos[0], VideoRecord("broken", broken), VideoRecord("gone", tmp_path / "gone.mp4")]
    report = caption(listed, captioner, CaptionOptions(tmp_path / "c.parquet", **QUICK))
    described, *skipped = report
    assert described == "1 videos described, 0 already present"
    assert [line.split(":")[0] for line in skipped] == ["skipped", "skipped"]
    assert str(broken) in skipped[0]
    assert set(pd.read_parquet(tmp_path / "c.parquet")["video_id"]) == {videos[0].video_id}


def test_a_clips_span_is_what_is_divided(captioner, videos, tmp_path):
    clip = dataclasses.replace(videos[0], span=(1.0, 4.0))
    caption([clip], captioner, CaptionOptions(tmp_path / "c.parquet", **QUICK))
    table = pq.read_table(tmp_path / "c.parquet").to_pylist()
    assert [(row["start"], row["end"]) for row in table] == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]


def test_the_verb_describes_a_recipes_training_videos_for_dpdv_to_read(videos, folder, tmp_path, capsys):
    root = videos[0].path.parents[2]
    out = tmp_path / "captions.parquet"
    overlay = Path(__file__).parents[2] / "recipes" / "data" / "msrvtt.yaml"
    # The recipe may name the very file that is to be written.
    recipe = tmp_path / "data.yaml"
    recipe.write_text(f"data: {{init_args: {{root: {root}, extra_captions: {out}, num_workers: 0}}}}")
    quick = ["--segments=2", "--frames=1", "--image_size=28", "--max_new_tokens=3", "--num_workers=0", "--device=cpu"]
    words = ["caption", f"--config={overlay}", f"--config={recipe}", f"--out={out}", f"--model={folder}", *quick]
    assert main(words) == 0
    assert f"Wrote {out}" in capsys.readouterr().out.replace("\n", "")
    data = data_from_recipe([str(overlay), str(recipe)])
    ids = [video.video_id for video in data.read_split("train").videos]
    assert pd.read_parquet(out)["video_id"].unique().tolist() == ids
    assert set(read_captions(out).descriptions) == set(ids)
    assert main([*(word for word in words if not word.startswith("--model")), "--model=nowhere"]) == 1
    assert "has no weights: looked in" in capsys.readouterr().err


def test_workers_do_not_change_what_is_said(captioner, videos, table, tmp_path):
    out = tmp_path / "c.parquet"
    caption(videos, captioner, CaptionOptions(out, batch_size=6, **(QUICK | {"num_workers": 1})))
    pd.testing.assert_frame_equal(pd.read_parquet(out), table)


def test_every_video_is_opened_once(captioner, videos, tmp_path, monkeypatch):
    opened = []
    really = av.open
    monkeypatch.setattr(
        av, "open", lambda file, *rest, **options: opened.append(file) or really(file, *rest, **options)
    )
    caption(videos, captioner, CaptionOptions(tmp_path / "c.parquet", **QUICK))
    assert opened == [f"file:{video.path}" for video in videos]


def test_other_weights_have_another_hash(folder, captioner):
    other = load_captioner(str(folder), "cpu")
    with torch.no_grad():
        next(other.model.parameters()).add_(1e-3)
    again = type(other)(other.model, other.processor, other.name)
    assert again.weights_hash != captioner.weights_hash
    assert load_captioner(str(folder), "cpu").weights_hash == captioner.weights_hash


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("chat_template.jinja", "assistant", "star"), ("tokenizer.json", "Whitespace", "WhitespaceSplit"),
     ("generation_config.json", "{", '{"repetition_penalty": 1.5,')],
)  # fmt: skip
def test_a_replaced_file_of_the_processor_gives_another_hash_and_a_copy_the_same(
    folder, captioner, tmp_path, name, old, new
):
    copy = shutil.copytree(folder, tmp_path / "model")
    assert load_captioner(str(copy), "cpu").weights_hash == captioner.weights_hash
    content = (copy / name).read_text(encoding="utf-8")
    assert old in content
    (copy / name).write_text(content.replace(old, new, 1), encoding="utf-8")
    assert load_captioner(str(copy), "cpu").weights_hash != captioner.weights_hash


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "nowhere/of/ours"])
def test_missing_weights_say_what_was_looked_for_and_how_to_go_without(model, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingWeightsError) as raised:
        load_captioner(model, "cpu")
    said = str(raised.value)
    assert model in said
    assert str(tmp_path) in said
    assert ("hf download" in said) == (model.count("/") == 1)
    for column in SCHEMA.names:
        assert column in said


def test_a_folder_without_weights_is_named(tmp_path, folder):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(MissingWeightsError, match=r"model\.safetensors") as raised:
        load_captioner(str(tmp_path), "cpu")
    assert str(tmp_path) in str(raised.value)


def test_a_processor_without_a_chat_template_is_refused(tmp_path, captioner):
    plain = save_tiny_captioner(tmp_path, template=None)
    with pytest.raises(UserError, match="no chat template"):
        load_captioner(str(plain), "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": 0}, "segments is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prompt": " "}, "prompt is empty"),
        ({"out": Path("captions.csv")}, "it must be a .parquet file"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        CaptionOptions(**({"out": tmp_path / "c.parquet"} | QUICK | change))
