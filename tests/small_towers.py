"""Small models with every kind of open_clip's towers, saved like open_clip's models, with trained tokenizers."""

import json
from pathlib import Path

import open_clip
import timm
import torch
from safetensors.torch import save_file
from timm.models import register_model

CAPTIONS = [
    "A red ball rolls to the left, slowly!",
    "two dogs chase a blue square",
    "someone slices an onion in a kitchen",
    "the camera follows a yellow car down the street",
    "a man is singing while a woman plays the piano",
]
SIZE, WIDTH = 32, 64
VIT = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
SWIN = {"img_size": SIZE, "embed_dim": 16}
TIMM = {
    "tvr_siglip": ("vit_base_patch16_siglip_224", VIT),
    "tvr_pe": ("vit_pe_core_base_patch16_224", {**VIT, "ref_feat_shape": (4, 4), "attn_pool_num_heads": 2}),
    "tvr_eva": ("eva02_base_patch16_clip_224", {**VIT, "ref_feat_shape": (4, 4)}),
    "tvr_relpos": ("vit_relpos_medium_patch16_cls_224", {**VIT, "rel_pos_dim": 16}),
    "tvr_gap": ("vit_medium_patch16_gap_256", VIT),
    "tvr_fastvit": ("fastvit_mci0", {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, WIDTH)}),
    "tvr_convnext": ("convnext_base", {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, WIDTH)}),
    "tvr_swin": ("swin_base_patch4_window7_224", {**SWIN, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}),
}
NATIVE = {"image_size": SIZE, "layers": 2, "width": WIDTH, "patch_size": 8}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": WIDTH, "heads": 1, "layers": 4}  # 4: of temporal layers
SIGLIP_TEXT = {
    **TEXT, "context_length": 20, "hf_tokenizer_name": "none/none", "tokenizer_kwargs": {"clean": "canonicalize"},
    "no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6},
    "act_kwargs": {"approximate": "tanh"},
}  # fmt: skip
SQUASH = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}
COCA = {"context_length": 16, "vocab_size": 49408, "width": WIDTH, "heads": 2, "layers": 1}
HUB = {"context_length": 20, "hf_tokenizer_name": "none/none"}


def _timm(name, pool, proj):
    return {"timm_model_name": name, "timm_pool": pool, "timm_proj": proj, "image_size": SIZE}


# vision_cfg, text_cfg, tokenizer, preprocess_cfg, further keys of model_cfg
KINDS = {
    "clip": (NATIVE, TEXT, None, {}, {"quick_gelu": True}),
    "resnet": ({"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None}, TEXT, None, {}, {}),
    "siglip": (
        _timm("tvr_siglip", "map", "none"), SIGLIP_TEXT, "sentencepiece", SQUASH,
        {"custom_text": True, "init_logit_bias": -10, "init_logit_scale": 4.75},
    ),
    "siglip2": (
        _timm("tvr_siglip", "map", "none"), SIGLIP_TEXT, "gemma", SQUASH,
        {"custom_text": True, "init_logit_bias": -16, "init_logit_scale": 4.7},
    ),
    "pe": (
        _timm("tvr_pe", "map", None), {**TEXT, "context_length": 12}, None,
        {**SQUASH, "interpolation": "bilinear"}, {"custom_text": True},
    ),
    "mobileclip": (
        {**_timm("tvr_fastvit", "avg", None), "image_size": 96}, {**TEXT, "no_causal_mask": True}, None,
        {"mean": [0.0] * 3, "std": [1.0] * 3, "interpolation": "bilinear"}, {"custom_text": True},
    ),
    "clipa": (
        {**NATIVE, "no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        {
            **TEXT, "hf_tokenizer_name": "none/none", "tokenizer_kwargs": {"strip_sep_token": True},
            "no_causal_mask": True, "pool_type": "last",
        },
        "bert", {**SQUASH, "interpolation": "bilinear"}, {},
    ),
    "worldwide": (
        NATIVE, {**TEXT, "hf_tokenizer_name": "none/none", "pool_type": "eos", "eos_id": 2}, "xlm-roberta", {}, {},
    ),
    "coca": (
        {**NATIVE, "attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 4, "output_tokens": True},
        {**TEXT, "embed_cls": True, "output_tokens": True}, None, {"resize_mode": "longest"},
        {"custom_text": True, "multimodal_cfg": COCA},
    ),
    "eva": (_timm("tvr_eva", "token", None), TEXT, None, {}, {"custom_text": True}),
    "relpos": (_timm("tvr_relpos", "", "linear"), TEXT, None, {}, {}),
    "gap": (_timm("tvr_gap", "", "linear"), TEXT, None, {}, {}),
    "convnext": (_timm("tvr_convnext", "", "mlp"), TEXT, None, {}, {}),
    "swin": (_timm("tvr_swin", "", "linear"), TEXT, None, {}, {}),
    "bert": (NATIVE, {**HUB, "hf_model_name": "bert", "hf_pooler_type": "cls_pooler"}, "bert", {}, {}),
    "xlm-roberta": (
        NATIVE, {**HUB, "hf_model_name": "xlm-roberta", "hf_pooler_type": "mean_pooler"}, "xlm-roberta", {}, {},
    ),
    "mt5": (NATIVE, {**HUB, "hf_model_name": "mt5", "hf_pooler_type": "mean_pooler"}, "mt5", {}, {}),
    "nllb": (
        _timm("tvr_siglip", "map", "none"),
        {**HUB, "hf_model_name": "m2m_100", "hf_proj_type": "linear", "hf_pooler_type": "cls_pooler"}, "xlm-roberta",
        SQUASH, {"custom_text": True, "init_logit_bias": -10},
    ),
}  # fmt: skip

ENCODER = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
HUB_CONFIGURATIONS = {
    "bert": {"hidden_size": 32, **ENCODER},
    "xlm-roberta": {"hidden_size": 32, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, **ENCODER},
    "mt5": {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "m2m_100": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64,
    },
}  # fmt: skip


def _register(name, base, options):
    def build(pretrained=False, **kwargs):
        passed = {key: kwargs[key] for key in ("num_classes", "global_pool") if key in kwargs}
        return timm.create_model(base, **options, **passed)

    build.__name__ = name
    build.__module__ = __name__
    register_model(build)
    globals()[name] = build  # timm adds it to the exports of this module


for _name, (_base, _options) in TIMM.items():
    _register(_name, _base, _options)


def save_tokenizer(kind: str, folder: Path) -> int:
    """Train a tokenizer of a kind on `CAPTIONS`, save its files and return how many ids it has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import BertTokenizerFast, PreTrainedTokenizerFast

    lines = [*CAPTIONS, *(caption.lower() for caption in CAPTIONS)] * 4
    if kind in ("sentencepiece", "mt5"):
        import sentencepiece
        from transformers import AutoTokenizer

        (folder / "lines.txt").write_text("\n".join(lines))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "lines.txt"), model_prefix=str(folder / "spiece"), vocab_size=50, pad_id=0, eos_id=1,
            unk_id=2, bos_id=-1, minloglevel=2,
        )  # fmt: skip
        pad = "<pad>" if kind == "mt5" else "</s>"  # SigLIP's tokenizers pad with the end of the text
        settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "eos_token": "</s>", "pad_token": pad}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return len(AutoTokenizer.from_pretrained(folder))
    if kind == "bert":
        # Not trained, because the trainer of word pieces breaks ties at random.
        letters = sorted(set("".join(lines).lower()) - {" "})
        shown = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
        shown += sorted({word for line in CAPTIONS[:3] for word in line.lower().split() if word.isalpha()} - {"a"})
        (folder / "vocab.txt").write_text("\n".join(shown))
        tokenizer = BertTokenizerFast(vocab={word: index for index, word in enumerate(shown)})
    else:
        special, end, template = {
            "xlm-roberta": (["<s>", "<pad>", "</s>", "<unk>"], "</s>", "<s> $A </s>"),
            "gemma": (["<pad>", "<eos>", "<bos>", "<unk>"], "<eos>", "$A <eos>"),
        }[kind]
        pieces = Tokenizer(models.BPE(unk_token="<unk>"))
        pieces.pre_tokenizer = pre_tokenizers.Metaspace()
        pieces.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=120, special_tokens=special))
        ids = [(token, pieces.token_to_id(token)) for token in special]
        pieces.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=pieces, pad_token="<pad>", eos_token=end, unk_token="<unk>", padding_side="right"
        )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_model(kind: str, folder: Path) -> str:
    """Save a small model of a kind into a new folder, as open_clip does, and return its name, `local-dir:/path`."""
    from transformers import AutoConfig

    vision, text, tokenizer, preparation, options = KINDS[kind]
    folder.mkdir(parents=True)
    text = dict(text)
    if tokenizer is not None:
        count = save_tokenizer(tokenizer, folder)
        if "hf_model_name" in text:
            model = text["hf_model_name"]
            AutoConfig.for_model(model, vocab_size=count, **HUB_CONFIGURATIONS[model]).save_pretrained(folder / "text")
            text["hf_model_name"] = str(folder / "text")
        else:
            text["vocab_size"] = count
    configuration = {"embed_dim": WIDTH, "vision_cfg": vision, "text_cfg": text, **options}
    content = {"model_cfg": configuration, "preprocess_cfg": preparation}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    model = open_clip.create_model(f"local-dir:{folder}", pretrained_text=False)
    side = model.visual.image_size if isinstance(model.visual.image_size, int) else model.visual.image_size[0]
    with torch.no_grad():
        for parameter in model.parameters():  # some layers start at zero
            parameter.add_(0.05 * torch.randn_like(parameter) * (parameter.ndim > 0))
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            for _ in range(40):  # statistics of batch norms
                model.train().encode_image(torch.randn(8, 3, side, side) + torch.randn(8, 3, 1, 1))
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    return f"local-dir:{folder}"
