"""Models of sentence-transformers that take videos get whole clips, as their authors and the library encode them."""

import json

import pytest
import torch
from tiny_transformers import save_tiny_embedder

from tvr_lightning.cli import main
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import LoRA, SentenceTransformersEncoder
from tvr_lightning.encoders.video_input import VideoOptions, published_sizes, video_input
from tvr_lightning.errors import UserError
from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.temporal import MeanP
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.drl import DRL, DRLOptions, MaxSim, NoDecorrelation

sentence_transformers = pytest.importorskip("sentence_transformers")
CAPTIONS = ["a red circle moves left then up", "star"]
PUBLISHED = VideoOptions("published", "list")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders of a model with one vector per video, and of one with a vector per token."""
    root = tmp_path_factory.mktemp("models")
    names = {"one": True, "several": False}
    return {name: str(save_tiny_embedder(root / name, pooling)) for name, pooling in names.items()}


def random_clips() -> Media:
    """Four clips of different sizes and lengths, at irregular times."""
    generator = torch.Generator().manual_seed(2)
    sizes = [(5, 40, 70), (4, 96, 64), (2, 70, 70), (8, 64, 128)]
    clips = [torch.randint(0, 256, (n, 3, h, w), dtype=torch.uint8, generator=generator) for n, h, w in sizes]
    mask = torch.arange(8) < torch.tensor([[len(clip)] for clip in clips])
    return Media(clips, mask, times=torch.rand(4, 8, generator=generator).cumsum(1) * mask)


def reversed_frames(media: Media) -> Media:
    return Media([clip.flip(0) for clip in media.pixels], media.frame_mask, times=media.times)


OF_A_FILE = VideoOptions("published", "real")


@pytest.mark.parametrize(
    ("height", "width", "frames", "options", "size"),
    [
        (240, 320, 64, PUBLISHED, (352, 416)), (240, 320, 16, PUBLISHED, (352, 416)),
        (720, 1280, 64, PUBLISHED, (352, 640)), (1280, 720, 64, PUBLISHED, (640, 352)),
        (720, 1280, 16, PUBLISHED, (640, 1184)), (224, 224, 64, PUBLISHED, (384, 384)),
        (360, 640, 64, PUBLISHED, (384, 640)),  # qwen-vl-utils 0.0.14 rounds frames of a list to multiples of 64
        (360, 640, 64, OF_A_FILE, (352, 640)),
        (720, 1280, 64, VideoOptions("published", "real", total_pixels=117_964_800), (640, 1152)),
    ],
)  # fmt: skip
def test_frames_get_the_published_sizes(height, width, frames, options, size):
    assert published_sizes(height, width, frames, options)[-1] == size


def test_times_are_those_of_a_list_or_of_the_file():
    frames, times = torch.zeros(3, 3, 32, 32, dtype=torch.uint8), torch.tensor([0.5, 2.0, 2.5])
    listed = video_input(frames, times, PUBLISHED, 32, 2)["video"]["video_metadata"]
    assert [place / listed["fps"] for place in listed["frames_indices"]] == [0.0, 0.5, 1.0, 1.5]
    real = video_input(frames, times, VideoOptions(), 32, 2)["video"]["video_metadata"]
    assert [place / real["fps"] for place in real["frames_indices"]] == pytest.approx([0.5, 2.0, 2.5, 2.5])


@pytest.mark.parametrize("options", [PUBLISHED, OF_A_FILE, VideoOptions()])
@torch.no_grad()
def test_vectors_equal_those_of_the_library_on_the_same_frames(models, options):
    encoder = SentenceTransformersEncoder(
        models["one"], video_options=options, query_instruction="find a video", generation_prompt=True
    ).eval()
    theirs = sentence_transformers.SentenceTransformer(models["one"], device="cpu")
    media = random_clips()
    video = encoder.encode_video(media)
    assert video.frames.shape == (4, 1, 32)
    assert video.frame_mask.all()
    for place, (frames, times) in enumerate(zip(media.pixels, media.times, strict=True)):
        given = video_input(frames, times[: len(frames)], options, 32, 2)
        processing = {
            "video": {"do_sample_frames": False, "do_resize": options.resize == "processor"},
            "chat_template": {"add_generation_prompt": True},
        }
        expected = theirs.encode_document([given], processing_kwargs=processing, convert_to_tensor=True)
        torch.testing.assert_close(video.frames[place], expected, atol=1e-5, rtol=0)
        alone = encoder.encode_video(media[place : place + 1])
        torch.testing.assert_close(alone.frames[0], video.frames[place], atol=1e-5, rtol=0)
    expected = theirs.encode(
        CAPTIONS, prompt="find a video.", convert_to_tensor=True,
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )  # fmt: skip
    torch.testing.assert_close(encoder.encode_text(CAPTIONS, 32).sentence, expected, atol=1e-5, rtol=0)
    assert (encoder.encode_video(reversed_frames(media)).frames - video.frames).abs().amax() > 1e-2
    encoder.batch_tokens = 1
    torch.testing.assert_close(encoder.encode_video(media).frames, video.frames, atol=1e-5, rtol=0)


@torch.no_grad()
def test_every_option_changes_the_vectors_and_the_fingerprint(models):
    media, plain = random_clips(), SentenceTransformersEncoder(models["one"]).eval()
    vectors, seen = plain.encode_video(media).frames, {plain.fingerprint()}
    for changes in (
        {"video_options": VideoOptions("published")}, {"video_options": VideoOptions(timestamps="list")},
        {"video_options": VideoOptions("published", total_pixels=100_000)}, {"document_instruction": "a plain video"},
        {"generation_prompt": True},
    ):  # fmt: skip
        changed = SentenceTransformersEncoder(models["one"], **changes).eval()
        seen.add(changed.fingerprint())
        assert (changed.encode_video(media).frames - vectors).abs().amax() > 1e-3
    short = SentenceTransformersEncoder(models["one"], dimension=8).eval()
    assert torch.equal(short.encode_video(media).frames, vectors[..., :8])
    assert short.dimension == 8
    seen |= {short.fingerprint(), SentenceTransformersEncoder(models["one"], max_length=4096).fingerprint()}
    seen.add(SentenceTransformersEncoder(models["one"], input="frames").fingerprint())
    assert len(seen) == 9


def test_both_towers_are_trained_through_whole_videos(models):
    method = CLIP4Clip(SentenceTransformersEncoder(models["one"]), tuning=LoRA(rank=2), frames=8).train()
    video = method.encoder.encode_video(random_clips())
    (method.encoder.encode_text(CAPTIONS, 8).sentence @ video.frames.mean(1).T).sum().backward()
    trained = [n for n, p in method.encoder.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert all(any(tower in name for name in trained) for tower in ("language_model", "visual"))


def test_what_a_model_cannot_do_is_refused_in_one_sentence(models):
    encoder = SentenceTransformersEncoder(models["one"])
    with pytest.raises(UserError, match=r"XPool compares frames, .* \(SentenceTransformersEncoder: input: frames\)\.$"):
        encoder.check_vectors("XPool", frames=True, patches=False)
    published = SentenceTransformersEncoder(models["one"], video_options=PUBLISHED)
    published.check_frames(128)
    with pytest.raises(UserError, match=r"frames is 130, but .* takes 128\. Lower data\.init_args\.frames\."):
        published.check_frames(130)
    with pytest.raises(UserError, match=r"A clip has \d+ tokens, but .* takes 40\."):
        SentenceTransformersEncoder(models["one"], max_length=40).encode_video(random_clips())
    with pytest.raises(UserError, match="dimension 64 is more than the 32 of"):
        SentenceTransformersEncoder(models["one"], dimension=64)


@torch.no_grad()
def test_a_model_of_several_vectors_gives_words_and_frames_to_maxsim(models):
    encoder = SentenceTransformersEncoder(models["several"]).eval()
    theirs = sentence_transformers.MultiVectorEncoder(models["several"], device="cpu")
    media = random_clips()
    text, video = encoder.encode_text(CAPTIONS, 32), encoder.encode_video(media)
    queries = theirs.encode_query(CAPTIONS)
    clips = [
        video_input(frames, times[: len(frames)], VideoOptions(), 32, 2)
        for frames, times in zip(media.pixels, media.times, strict=True)
    ]
    documents = theirs.encode_document(clips, processing_kwargs={"video": {"do_sample_frames": False}})
    assert video.frame_mask.sum(1).tolist() == [len(document) for document in documents]
    joined = VideoFeatures.cat([encoder.encode_video(media[:1]), encoder.encode_video(media[1:])])
    torch.testing.assert_close(joined.frames, video.frames, atol=1e-5, rtol=0)
    expected = theirs.similarity(queries, documents)
    for mean in (False, True):
        options = DRLOptions(MaxSim(mean=mean), MeanP(), NoDecorrelation())
        method = DRL(encoder, drl=options, frames=8, words=32)
        assert not method.needs_frames
        lengths = torch.tensor([[len(query)] for query in queries]) if mean else 1
        torch.testing.assert_close(method.score(text, video).similarity, expected / lengths, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "several"])
def test_stored_vectors_give_the_table_of_the_videos(kind, models, msrvtt, tmp_path):
    encoder = {"class_path": "SentenceTransformersEncoder", "init_args": {"weights": models[kind]}}
    maxsim = {"interaction": "MaxSim", "temporal_encoder": "MeanP", "decorrelation": "NoDecorrelation"}
    method = {"encoder": encoder, "tuning": "Frozen"} | ({"drl": maxsim} if kind == "several" else {})
    data = {"root": str(msrvtt), "num_workers": 0, "frames": 4, "words": 16, "eval_batch_size": 3}
    data |= {"sampling": "uniform-floor", "train_sampling": None, "augmentation": "none"}
    content = {"model": {"init_args": method}, "data": {"init_args": data}, "trainer": {"accelerator": "cpu"}}
    (tmp_path / "own.yaml").write_text(json.dumps(content))
    given = [f"--config={'drl' if kind == 'several' else 'zero-shot'}", f"--config={tmp_path / 'own.yaml'}"]
    store = tmp_path / "store"
    assert main(["extract", *given, "--parts=text", "--parts=frames", f"--out={store}", "--device=cpu"]) == 0
    found = []
    for source in ([], [f"--data.init_args.features={store}"]):
        runs = tmp_path / f"runs{len(found)}"
        assert main(["test", *given, *source, f"--results.directory={runs}"]) == 0
        (results,) = runs.glob("*/*/results.json")
        found.append(json.loads(results.read_text())["text_to_video"])
    assert found[0] == found[1]


@pytest.mark.slow
def test_every_command_reads_whole_videos(models, msrvtt, tmp_path):
    options = {"weights": models["one"], "video_options": {"resize": "published", "timestamps": "list"}}
    encoder = {"class_path": "SentenceTransformersEncoder", "init_args": options}
    data = {"root": str(msrvtt), "num_workers": 0, "frames": 4, "words": 16, "eval_batch_size": 4, "batch_size": 4}
    trainer = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, "limit_train_batches": 1}
    sampling = {"sampling": "uniform-floor", "train_sampling": None, "augmentation": "none"}
    content = {"model": {"init_args": {"encoder": encoder}}, "data": {"init_args": data | sampling}, "trainer": trainer}
    recipe, store = tmp_path / "recipe.yaml", tmp_path / "pixels"
    recipe.write_text(json.dumps(content))
    given = [f"--config={recipe}", f"--results.directory={tmp_path / 'runs'}"]
    assert main(["extract", "--config=zero-shot", given[0], "--parts=pixels", f"--out={store}", "--device=cpu"]) == 0
    found = []
    for source in ([], [f"--data.init_args.pixels={store}"]):
        assert main(["test", "--config=zero-shot", *given, *source]) == 0
        newest = max((tmp_path / "runs").glob("*/*/results.json"), key=lambda path: path.stat().st_mtime_ns)
        found.append(json.loads(newest.read_text()))
    assert found[0]["audit"]["passed"] is True
    assert found[0]["text_to_video"] == found[1]["text_to_video"]
    assert main(["fit", "--config=xpool", *given]) == 2  # compares frames
    lora = ["--model.init_args.tuning=LoRA", "--model.init_args.clip4clip.similarity_header=MeanP"]
    assert main(["fit", "--config=clip4clip", *given, *lora]) == 0
    (checkpoint,) = (tmp_path / "runs").glob("*/*/checkpoints/last.ckpt")
    index = str(tmp_path / "index")
    videos = str(next(msrvtt.rglob("*.mp4")).parent)
    assert main(["index", videos, "--out", index, "--ckpt_path", str(checkpoint)]) == 0
    assert main(["search", "a red circle", "--index", index]) == 0


def test_lora_equals_peft_in_outputs_and_gradients(models):
    peft = pytest.importorskip("peft")
    encoder, theirs = (SentenceTransformersEncoder(models["one"]).eval() for _ in range(2))
    LoRA(rank=4, alpha=8.0, targets=("query", "key", "value", "mlp"), towers=("text",)).apply(encoder)
    layers = r".*language_model.*\.(q_proj|k_proj|v_proj|gate_proj|up_proj|down_proj)"
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers)
    peft.inject_adapter_in_model(config, theirs.model.transformers_model)
    encoder.double()  # float32 gradients differ by the processor
    theirs.double()
    ours = {name: part for name, part in encoder.named_parameters() if part.requires_grad}
    others = dict(theirs.named_parameters())
    pairs = []
    for name, part in ours.items():
        owner, _, matrix = name.partition(".parametrizations.weight.0.")
        pairs.append((part, others[f"{owner}.lora_{'A' if matrix == 'down' else 'B'}.default.weight"]))
    assert len(pairs) == 2 * 6 * 2  # matrices, kinds of layers, and blocks
    generator = torch.Generator().manual_seed(0)
    for part, other in pairs:
        part.data.normal_(std=0.1, generator=generator)
        other.data.copy_(part.data[0])
    outputs = []
    for each in (encoder, theirs):
        video, text = each.encode_video(random_clips()).frames, each.encode_text(CAPTIONS, 8).sentence
        outputs.append(torch.cat([video[:, 0], text]))
        outputs[-1].square().cumsum(1).sum().backward()
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    for part, other in pairs:
        torch.testing.assert_close(part.grad[0], other.grad, atol=1e-5, rtol=1e-4)
        assert other.grad.abs().sum() > 0
