"""Models of sentence-transformers give the embeddings of the library, of captions, frames, and whole videos."""

import json
from pathlib import Path

import pytest
import torch
from encoders.parts import random_media
from tiny_transformers import captions_tokenizer, save_tiny_captioner, save_tiny_embedder

from tvr_lightning.cli import main
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import LoRA, MissingWeightsError, SentenceTransformersEncoder
from tvr_lightning.encoders.video_input import VideoOptions, published_sizes, video_input
from tvr_lightning.errors import UserError
from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.temporal import MeanP
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.drl import DRL, DRLOptions, MaxSim, NoDecorrelation

sentence_transformers = pytest.importorskip("sentence_transformers")
CAPTIONS = ["a red circle moves left then up", "star"]
PUBLISHED, OF_A_FILE = VideoOptions("published", "list"), VideoOptions("published", "real")


def save_clip(folder: Path) -> None:
    """Save a small random CLIP as transformers does."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    tokenizer, vocabulary = captions_tokenizer(CAPTIONS)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": vocabulary, "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders of a CLIP, of a vision-language model, and of models of videos with one vector and one per token."""
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    root = tmp_path_factory.mktemp("models")
    save_clip(root / "clip")
    save_tiny_captioner(root / "captioner")
    modules = [Transformer(str(root / "captioner")), Pooling(32, pooling_mode="lasttoken"), Normalize()]
    prompts = {"query": "on the plain", "document": "background"}
    sentence_transformers.SentenceTransformer(modules=modules, prompts=prompts).save(str(root / "vlm"))
    videos = {"one": save_tiny_embedder(root / "one"), "several": save_tiny_embedder(root / "several", pooling=False)}
    return {name: str(folder) for name, folder in {"clip": root / "clip", "vlm": root / "vlm", **videos}.items()}


def random_clips() -> Media:
    """Four clips of different sizes and lengths, at irregular times."""
    generator = torch.Generator().manual_seed(2)
    sizes = [(5, 40, 70), (4, 96, 64), (2, 70, 70), (8, 64, 128)]
    clips = [torch.randint(0, 256, (n, 3, h, w), dtype=torch.uint8, generator=generator) for n, h, w in sizes]
    mask = torch.arange(8) < torch.tensor([[len(clip)] for clip in clips])
    return Media(clips, mask, times=torch.rand(4, 8, generator=generator).cumsum(1) * mask)


SIZES = {"clip": 32, "vlm": 56}


def build(models: dict[str, str], kind: str) -> SentenceTransformersEncoder:
    return SentenceTransformersEncoder(models[kind], image_size=SIZES[kind], input="frames")


@pytest.mark.parametrize("kind", SIZES)
@torch.no_grad()
def test_features_equal_those_of_the_library(models, kind):
    encoder, theirs = build(models, kind).eval(), sentence_transformers.SentenceTransformer(models[kind], device="cpu")
    text = encoder.encode_text(CAPTIONS, 12)
    torch.testing.assert_close(text.sentence, theirs.encode_query(CAPTIONS, convert_to_tensor=True).cpu())
    frames = random_media(SIZES[kind])
    images = list(frames.pixels.flatten(0, 1).permute(0, 2, 3, 1).numpy())
    video = encoder.encode_video(frames)
    expected = theirs.encode_document(images, convert_to_tensor=True).cpu()
    torch.testing.assert_close(video.frames.flatten(0, 1), expected)
    assert torch.equal(video.frame_mask, frames.frame_mask)
    assert (encoder.dimension, *video.frames.shape) == ({"clip": 24, "vlm": 32}[kind], 2, 3, encoder.dimension)
    assert expected.std(dim=0).mean() > 1e-3
    with pytest.raises(UserError, match="gives no patches"):
        encoder.encode_video(frames, patches=True)


@torch.no_grad()
def test_words_are_the_vectors_of_tokens_or_the_sentence(models):
    encoder = build(models, "vlm").eval()
    theirs = sentence_transformers.SentenceTransformer(models["vlm"], device="cpu")
    text = encoder.encode_text(CAPTIONS, 14)
    tokens = theirs.encode_query(CAPTIONS, output_value="token_embeddings")
    assert text.words.shape == (2, 14, 32)
    assert text.word_mask.sum(1).tolist() == [14, len(tokens[1])]
    torch.testing.assert_close(text.words[0], tokens[0][-14:].cpu())
    torch.testing.assert_close(text.words[1][: len(tokens[1])], tokens[1].cpu())
    text = build(models, "clip").eval().encode_text(CAPTIONS, 14)
    assert torch.equal(text.words, text.sentence.unsqueeze(1))
    assert text.word_mask.all()


@pytest.mark.parametrize("kind", [*SIZES, "one"])
def test_both_towers_are_trained_also_with_lora(models, kind):
    media = random_media(SIZES[kind]) if kind in SIZES else random_clips()
    for tuning in (None, LoRA(rank=2)):
        encoder = build(models, kind) if kind in SIZES else SentenceTransformersEncoder(models[kind])
        method = CLIP4Clip(encoder, tuning=tuning, frames=8, words=8).train()
        before = method.encoder.fingerprint()
        text, video = method.encoder.encode_text(CAPTIONS, 8), method.encoder.encode_video(media)
        (text.sentence @ video.frames.mean(1).T).sum().backward()
        trained = [n for n, p in method.encoder.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
        for tower in ("text_model", "vision_model") if kind == "clip" else ("language_model", "visual"):
            assert any(tower in name for name in trained)
        assert not [name for name, p in method.encoder.named_parameters() if "logit" in name and p.requires_grad]
        assert method.encoder.fingerprint() == before
    expected = 2.6592 if kind == "clip" else torch.log(torch.tensor(100.0)).item()
    assert encoder.initial_logit_scale() == pytest.approx(expected, abs=1e-3)


def test_the_fingerprint_includes_prompts_and_sizes(models):
    encoder = build(models, "vlm")
    plain = encoder.fingerprint()
    assert SentenceTransformersEncoder(models["vlm"], image_size=28, input="frames").fingerprint() != plain
    encoder.query_prompt = "a star"
    assert encoder.fingerprint() != plain
    half = SentenceTransformersEncoder(models["vlm"], 56, dtype="bfloat16")
    assert half.encode_text(["a"], 8).words.dtype == torch.float32


def test_models_without_images_files_or_trust_are_refused_before_their_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for create in (SentenceTransformersEncoder, SentenceTransformersEncoder.required_files):
        with pytest.raises(UserError, match=r"does not accept images\. Choose a model for texts and images\.$"):
            create(weights=str(tmp_path))
    with pytest.raises(MissingWeightsError, match=r"missing/model is missing: .* `hf download missing/model`"):
        SentenceTransformersEncoder("missing/model")
    (tmp_path / "preprocessor_config.json").write_text('{"image": 1}')
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "own.Model"}}')
    with pytest.raises(UserError, match="needs code from its repository, which is not run"):
        SentenceTransformersEncoder(str(tmp_path))


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
    backward = Media([clip.flip(0) for clip in media.pixels], media.frame_mask, times=media.times)
    assert (encoder.encode_video(backward).frames - video.frames).abs().amax() > 1e-2
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
