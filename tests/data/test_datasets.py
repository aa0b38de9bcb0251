import pytest
import torch

import tvr_lightning.data as rooms
from tvr_lightning.data import TextVideoDataModule
from tvr_lightning.data.check import check

SMALL = {"frames": 3, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}
KINDS = [
    (rooms.ActivityNet, {}),
    (rooms.Charades, {}),
    (rooms.Charades, {"split": "sta"}),
    (rooms.DiDeMo, {}),
    (rooms.LSMDC, {}),
    (rooms.MSRVTT, {"split": "full"}),
    (rooms.MSVD, {}),
    (rooms.VATEX, {"language": "zh"}),
    (rooms.VATEX, {"annotations": "official", "protocol": "first-caption"}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_layout_loads_from_its_files_to_its_batches(synthetic, kind, options):
    data: TextVideoDataModule = kind(root=str(synthetic(kind.directory)), **options, **SMALL)
    data.setup()
    train = data.load_split("train")
    batch = next(iter(data.train_dataloader()))
    assert batch.video.video.pixels.shape == (4, 3, 3, 32, 32)
    assert batch.video.video.pixels.float().std() > 10
    assert batch.video.video.pixels.dtype == torch.uint8
    assert batch.video.video.frame_mask.shape == (4, 3)
    pairs = zip(
        batch.text.index.tolist(), batch.video.index.tolist(), batch.text.text, batch.video.video_id, strict=True
    )
    for text, video, words, video_id in pairs:
        assert (train.texts[text].video, train.texts[text].text) == (video, words)
        assert train.videos[video].video_id == video_id
    for name in ("val", "test"):
        truth = data.ground_truth(name)
        texts, videos = data.evaluation_dataloaders(name)
        assert torch.equal(torch.cat([b.index for b in texts]), torch.arange(truth.texts))
        assert torch.equal(torch.cat([b.index for b in videos]), torch.arange(truth.videos))
        assert bool((torch.bincount(truth.video_of_text, minlength=truth.videos) > 0).all())
        if data.one_caption_evaluation:
            assert truth.texts == truth.videos or kind is rooms.LSMDC
    assert truth.protocol == data.read_split("test").protocol
    ids = [{(v.path, v.span) for v in data.read_split(name).videos} for name in ("train", "test")]
    assert not ids[0] & ids[1]
    report = check(data, decode=True, progress=False)
    assert {problem.kind for problem in report.problems} <= {"silent"}
