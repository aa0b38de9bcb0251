"""A feature store returns what was written, or reports what is damaged; it survives interruptions and full disks."""

import json
import shutil
import time
from hashlib import sha256

import pytest
import torch
from child_processes import fork, unprivileged
from safetensors import safe_open

from tvr_lightning.errors import UserError
from tvr_lightning.store import FeatureStore, StoreError, StoreItem, StoreWriter
from tvr_lightning.store.feature_store import file_mark

WIDTH, FRAMES, WORDS = 8, 4, 6
FINGERPRINT = {"encoder": "tiny 0123", "weights": "abcd", "sampling": "four frames", "preprocessing": "as it is"}
COMMAND = "tvr extract --config recipe.yaml --out features"


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def videos(first, count):
    return [StoreItem("set", "train", f"video{i}", f"videos/video{i}.mp4") for i in range(first, first + count)]


def key(number):
    return ("set", f"video{number}", None)


def write(path, *parts, **options):
    """Open a store for writing these parts, or frames only."""
    return StoreWriter.open(path, dict.fromkeys(parts or ["frames"], FINGERPRINT), COMMAND, **options)


def append_frames(writer, first, count, skipped=()):
    """Write videos whose features are their number."""
    values = torch.arange(first, first + count).view(-1, 1, 1).expand(-1, FRAMES, WIDTH).float()
    mask = torch.ones(count, FRAMES, dtype=torch.bool)
    writer.append("frames", videos(first, count), {"frames": values}, mask, skipped)


def shard_of(store, number):
    (file,) = store.glob(f"frames-{number:05d}-*.safetensors")
    return file


def contents(store):
    return {file.name: file.read_bytes() for file in store.glob("frames-*")}


@pytest.fixture
def store(tmp_path):
    """A store of three shards of two videos each."""
    with write(tmp_path / "store") as writer:
        for first in (0, 2, 4):
            append_frames(writer, first, 2)
    return tmp_path / "store"


def test_all_parts_are_returned_as_written_in_any_order(tmp_path):
    given = {
        "frames": numbers(3, FRAMES, WIDTH),
        "patches": numbers(3, FRAMES, 5, WIDTH, seed=1),
        "audio": numbers(3, FRAMES, 2, seed=2),
    }
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True, False, False, False]])
    masks = {"frames": mask, "patches": mask, "audio": ~mask}
    tensors = {"sentence": numbers(2, WIDTH, seed=3), "words": numbers(2, WORDS, WIDTH, seed=4)}
    word_mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    texts = [StoreItem.of_text(text, "set", "train") for text in ("a dog barks", "a cat sleeps")]
    with write(tmp_path, *given, "text") as writer:
        for part, values in given.items():
            writer.append(part, videos(0, 3), {part: values}, masks[part])
        writer.append("text", texts, tensors, word_mask)
    store = FeatureStore(tmp_path)
    found, order = store.video([key(2), key(0)], patches=True), [2, 0]
    for part, values in given.items():
        assert torch.equal(getattr(found, part), values[order])
    assert torch.equal(found.frame_mask, mask[order])
    assert torch.equal(found.audio_mask, ~mask[order])
    text = store.text(["a cat sleeps", "a dog barks", "a cat sleeps"])
    for name, values in {**tensors, "word_mask": word_mask}.items():
        assert torch.equal(getattr(text, name), values[[1, 0, 1]])
    assert store.parts == ["text", "frames", "patches", "audio"]
    assert len(store) == 3
    assert store.video([key(1)]).patches is None


def test_the_table_describes_every_item_and_safetensors_alone_reads_a_shard(tmp_path):
    with write(tmp_path, "frames", "text") as writer:
        append_frames(writer, 0, 2)
        append_frames(writer, 2, 2, [(StoreItem("set", "test", "film", "film.mp4", (1.0, 2.5)), "no video stream")])
        tensors = {"sentence": numbers(1, WIDTH), "words": numbers(1, WORDS, WIDTH)}
        texts = [StoreItem.of_text("a dog barks", "set", "test")]
        writer.append("text", texts, tensors, torch.ones(1, WORDS, dtype=torch.bool))
    table = FeatureStore(tmp_path).table()
    assert table["id"].tolist()[1:] == ["video0", "video1", "video2", "video3", "film"]
    text, row, film = (dict(table.iloc[place]) for place in (0, 4, 5))
    assert text.items() >= {"part": "text", "split": "test", "text": "a dog barks"}.items()
    assert film.items() >= {"span_start": 1.0, "span_end": 2.5, "skipped": "no video stream"}.items()
    place = {"dataset": "set", "split": "train", "path": "videos/video3.mp4", "row": 1, "dtype": "float32"}
    assert row.items() >= {**place, **FINGERPRINT}.items()
    shard = tmp_path / row["shard"]
    assert row["shard"] == f"frames-00001-{sha256(shard.read_bytes()).hexdigest()[:32]}.safetensors"
    with safe_open(shard, framework="pt") as file:
        header = json.loads(file.metadata()["tvr"])
        assert file.get_tensor("frames").shape == (2, FRAMES, WIDTH)
    described = {"format": 3, "part": "frames", "command": COMMAND, "fingerprint": FINGERPRINT}
    assert header.items() >= described.items()
    assert [item["id"] for item in header["items"]] == ["video2", "video3"]


def test_half_precision_halves_the_shards_and_rounds_to_float16(tmp_path):
    values, mask = numbers(2, FRAMES, 1024), torch.ones(2, FRAMES, dtype=torch.bool)
    for dtype in ("float32", "float16"):
        with write(tmp_path / dtype, dtype=dtype) as writer:
            writer.append("frames", videos(0, 2), {"frames": values}, mask)
    found = FeatureStore(tmp_path / "float16").video([key(0), key(1)]).frames
    assert found.dtype == torch.float32
    assert torch.equal(found, values.half().float())
    sizes = [shard_of(tmp_path / dtype, 0).stat().st_size for dtype in ("float16", "float32")]
    assert sizes[0] < 0.6 * sizes[1]
    with pytest.raises(StoreError, match="contains float16, but this run writes float32"), write(tmp_path / "float16"):
        pass
    with write(tmp_path / "large", dtype="float16") as writer, pytest.raises(StoreError, match="too large for float16"):
        writer.append("frames", videos(0, 2), {"frames": 1e6 * values}, mask)


def test_a_skipped_video_keeps_its_reason_until_it_is_read(tmp_path):
    with write(tmp_path) as writer:
        append_frames(writer, 0, 2, [(videos(9, 1)[0], "no video stream")])
        assert set(writer.parts["frames"].places) == {key(0), key(1)}
        assert set(writer.parts["frames"].skipped) == {key(9)}
    store = FeatureStore(tmp_path)
    assert store.skipped("frames") == {key(9): "no video stream"}
    with pytest.raises(StoreError, match="no features of video9: it was skipped: no video stream"):
        store.video([key(9)])
    with write(tmp_path) as writer:
        append_frames(writer, 9, 1)
    store = FeatureStore(tmp_path)
    assert store.skipped("frames") == {}
    assert float(store.video([key(9)]).frames.mean()) == 9


def test_spans_of_one_video_are_separate_items_with_one_row_each(tmp_path):
    spans = [(0.0, 2.5), (2.5, 7.0)]
    items = [StoreItem("set", "test", "film", "film.mp4", span) for span in spans]
    mask = torch.ones(2, FRAMES, dtype=torch.bool)
    with write(tmp_path) as writer:
        with pytest.raises(ValueError, match=r"frames: 2 items, but features .*'frames': 3.*one row per item"):
            writer.append("frames", items, {"frames": numbers(3, FRAMES, WIDTH)}, mask)
        assert not contents(tmp_path)
        writer.append("frames", items, {"frames": numbers(2, FRAMES, WIDTH)}, mask)
    store = FeatureStore(tmp_path)
    assert torch.equal(store.video([("set", "film", span) for span in spans]).frames, numbers(2, FRAMES, WIDTH))
    with pytest.raises(StoreError, match=r"no features of film \(0 to 3 s\): it is missing"):
        store.video([("set", "film", (0.0, 3.0))])


def test_a_store_with_other_settings_is_refused_with_both_values(store, tmp_path, monkeypatch):
    other = {**FINGERPRINT, "weights": "ffff", "sampling": "twelve frames"}
    message = "weights: the store has 'abcd', this run 'ffff'; sampling: the store has 'four frames', this run 'twelve"
    with pytest.raises(StoreError, match=message):
        FeatureStore(store).require("frames", other)
    with pytest.raises(StoreError, match=message), StoreWriter.open(store, {"frames": other}, COMMAND):
        pass
    FeatureStore(store).require("frames", FINGERPRINT)
    with pytest.raises(StoreError, match=r"has no part 'audio', only frames. Add it with: tvr extract .*--parts audio"):
        FeatureStore(store).require("audio", {})
    with StoreWriter.open(tmp_path / "other", {"frames": other}, COMMAND) as writer:
        append_frames(writer, 6, 2)
    shutil.copy(shard_of(tmp_path / "other", 0), store)
    with pytest.raises(StoreError, match=r"frames-00000-.* has other settings, part 'frames': weights: the store has"):
        FeatureStore(store)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StoreError, match=r"is not a feature store.*Create one with: tvr extract"):
            FeatureStore(folder)
    monkeypatch.setattr("tvr_lightning.store.feature_store.FORMAT", 4)
    with pytest.raises(StoreError, match=r"the format is not 4, .*Extract again"):
        FeatureStore(tmp_path / "other").require("frames", {})


def test_removed_and_unfinished_shards_are_missing_and_written_again_by_one_process(store):
    before = contents(store)
    FeatureStore(store).require_items("frames", {key(i): None for i in range(6)})
    (store / f"{shard_of(store, 2).name}.writing").write_bytes(shard_of(store, 2).read_bytes()[:100])
    assert len(FeatureStore(store)) == 6
    shard_of(store, 1).unlink()
    with pytest.raises(StoreError, match=f"2 of 5 items.*are missing.*first video2.*Complete it with: {COMMAND}"):
        FeatureStore(store).require_items("frames", {key(i): None for i in range(5)})
    with write(store) as writer:
        assert writer.rewritten == []
        with pytest.raises(StoreError, match="Another process is writing"), write(store):
            pass
        assert len(FeatureStore(store)) == 4, "readers need no lock"
        append_frames(writer, 2, 2)
    assert contents(store) == before


@pytest.mark.parametrize("damage", ["cut", "emptied", 0, 300, 0.5, -1])
def test_a_damaged_shard_is_refused_with_the_command_that_rewrites_it(store, damage):
    before = contents(store)
    damaged = shard_of(store, 1)
    data = bytearray(damaged.read_bytes())
    if damage in ("cut", "emptied"):
        del data[-10 if damage == "cut" else 0 :]
    else:  # a byte in the length of the header, in the header, in the features, or at the end
        data[len(data) // 2 if damage == 0.5 else damage] ^= 1
    damaged.write_bytes(data)
    opened = FeatureStore(store)
    assert float(opened.video([key(0)]).frames.mean()) == 0, "the other shards can be read"
    with pytest.raises(StoreError, match=rf"{damaged.name}: the shard.*Rewrite it.*{COMMAND}"):
        opened.verify()
    with pytest.raises(StoreError, match=rf"{damaged.name}|no features of video3"):
        opened.video([key(3)])
    with write(store) as writer:
        assert len(writer.rewritten) == 1
        assert set(writer.parts["frames"].places) == {key(i) for i in (0, 1, 4, 5)}
        append_frames(writer, 2, 2)
    assert contents(store) == {**before, f"{damaged.name}.damaged": bytes(data)}, "nothing is deleted"


def test_a_link_out_of_the_store_is_not_read(store):
    shard, elsewhere = shard_of(store, 1), store.parent / "elsewhere.safetensors"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    before = sorted(store.parent.rglob("*"))
    for open_store in (lambda: FeatureStore(store), write(store).__enter__):
        with pytest.raises(StoreError, match=rf"{shard.name} is a link to .*elsewhere.*outside the feature store"):
            open_store()
    assert sorted(store.parent.rglob("*")) == before
    shard.unlink()
    elsewhere.rename(shard)
    link = store.parent / "link"
    link.symlink_to(store)
    with write(link) as writer:
        append_frames(writer, 6, 2)
    assert len(FeatureStore(link)) == 8, "the store itself may be reached through a link"


def write_growing_shards(path):
    """Write shards of one, two, and three videos."""
    with write(path) as writer:
        for first, count in ((0, 1), (1, 2), (3, 3)):
            if key(first) not in writer.parts["frames"].places:
                append_frames(writer, first, count)


def test_a_full_disk_leaves_a_valid_store_that_a_rerun_completes(tmp_path, limit_files):
    write_growing_shards(tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    stopped = []
    for limit in sorted(len(content) - 1 for content in whole.values()):
        path = tmp_path / str(limit)
        limit_files(limit)
        with pytest.raises(UserError, match=rf"File too large\. .* file size limit .* rerun the command: {COMMAND}"):
            write_growing_shards(path)
        limit_files()
        stopped.append(len(contents(path)))
        assert contents(path).items() <= whole.items()
        assert not list(path.rglob("*writing*"))
        write_growing_shards(path)
        assert contents(path) == whole
    assert stopped == [0, 1, 2]


def test_a_writer_killed_at_any_moment_leaves_a_valid_store(tmp_path, ended):
    def keep_writing(path):
        with write(path) as writer:
            for number in range(1000):
                append_frames(writer, 2 * number, 2)

    reached = set()
    for trial in range(5):
        path = tmp_path / str(trial)
        writer = ended(fork(keep_writing, path))
        time.sleep(0.04 * (trial + 1))
        writer.kill()
        writer.join()
        with write(path) as again:
            done = len(again.parts["frames"].places)
            assert again.rewritten == []
            append_frames(again, done, 2)
        store = FeatureStore(path)
        store.verify()
        keys = [key(number) for number in range(done + 2)]
        assert store.video(keys).frames[:, 0, 0].tolist() == list(range(done + 2))
        reached.add(done)
    assert max(reached) > 0


def test_a_file_without_permission_has_no_mark(tmp_path):
    closed = tmp_path / "closed.mp4"
    closed.write_bytes(b"video")
    assert file_mark(closed) is not None
    closed.chmod(0)
    with unprivileged():
        assert file_mark(closed) is None
