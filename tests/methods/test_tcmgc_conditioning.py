"""TC-MGC selects the frames that a text describes, and on the synthetic dataset it keeps up with mean pooling."""

import pytest
import torch
from methods.parts import RECIPES, descend, features

from tvr_lightning.cli import main
from tvr_lightning.methods.tcmgc.model import TCMGCHead
from tvr_lightning.methods.tcmgc.options import LanguageVideoAttention, TCMGCOptions
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.losses import info_nce

WORDS, FRAMES, WIDTH, SCALE = 10, 3, 32, torch.tensor(20.0)


def scenes(seed, videos=48):
    """Texts that each describe one frame of a video, and videos of unrelated frames."""
    text, video = features(videos, videos, words=WORDS, frames=FRAMES, width=WIDTH, seed=seed)
    described = video.frames[torch.arange(videos), torch.arange(videos) % FRAMES]
    text.sentence, text.words = described + text.sentence, described[:, None] + text.words
    video.frame_mask[:] = True
    return text, video


def recall(similarity):
    return (similarity.argmax(1) == torch.arange(len(similarity))).float().mean().item()


def test_attention_selects_the_described_frames_of_videos_not_seen_in_training(monkeypatch):
    torch.manual_seed(0)
    options = TCMGCOptions(attention=LanguageVideoAttention(dropout=0.0), keep_rate=0.4, temporal_layers=0)
    head, pairs = TCMGCHead(WIDTH, WORDS, FRAMES, options), scenes(seed=0)
    descend(lambda: info_nce(SCALE * head(*pairs, SCALE).similarity), dict(head.named_parameters()))
    text, video = scenes(seed=1)
    pooled = recall(torch.cosine_similarity(text.sentence[:, None], video.frames.mean(1), dim=-1))
    conditioned = recall(head(text, video, SCALE).similarity)
    assert conditioned > pooled + 0.2
    weigh = head.attention._weights
    monkeypatch.setattr(head.attention, "_weights", lambda *given: weigh(*given).roll(1, dims=1))
    assert recall(head(text, video, SCALE).similarity) < pooled


@pytest.mark.slow
def test_tcmgc_is_at_most_five_points_worse_than_mean_pooling(recipe, synthetic, tmp_path):
    root, store = synthetic("msrvtt", 250), tmp_path / "pixels"
    grid = "{class_path: examples.color_grid_encoder.ColorGridEncoder, init_args: {dimension: 64, image_size: 32}}"
    data = (f"--model.init_args.encoder={grid}", "--data.init_args.frames=4", "--data.init_args.batch_size=32")
    without = "--model.init_args.tcmgc.temporal_layers=0"
    recipes = [f"--config={RECIPES / name}.yaml" for name in ("tcmgc", "fixture")]
    stored = [f"--data.init_args.root={root}", "--parts=pixels", f"--out={store}", "--num_workers=0"]
    assert main(["extract", *recipes, *data, *stored, without]) == 0
    softmax_lambda = "tcmgc.similarity_aggregation.init_args.softmax_lambda=10"  # as in `make demo`
    options = {
        "clip4clip": ("clip4clip.similarity_header=MeanP", "optimizer.lr=3e-3", "optimizer.encoder_lr=3e-3"),
        "tcmgc": (softmax_lambda, "tcmgc.temporal_layers=0", "optimizer.lr=2e-3", "optimizer.encoder_lr=2e-3"),
    }
    found, encoder = {}, {}
    for name, changes in options.items():
        more = [f"--model.init_args.{change}" for change in changes]
        method, split = recipe(name, root=root, options=(*data, f"--data.init_args.pixels={store}", *more))
        if encoder:  # of mean pooling, from which TC-MGC starts
            method.encoder.load_state_dict(encoder)
        trainer = quiet_trainer(max_epochs=20, limit_val_batches=0, gradient_clip_val=1.0)
        trainer.fit(method, datamodule=split)
        trainer.test(method, datamodule=split, verbose=False)
        found[name], encoder = method.evaluation.text_to_video["R@1"], method.encoder.state_dict()
    assert found["tcmgc"] >= found["clip4clip"] - 5
    assert min(found.values()) >= 10
