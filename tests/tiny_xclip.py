"""A random X-CLIP of transformers, which MTEB's wrapper loads from a folder."""

from tiny_transformers import captions_tokenizer

XCLIP = "mteb.models.model_implementations.xclip_models.XCLIPModel"


def save_tiny_xclip(folder, captions):
    """Write config, seeded weights, processor, and a tokenizer for the words of some captions into `folder`."""
    import torch
    from transformers import VideoMAEImageProcessor, XCLIPConfig, XCLIPModel, XCLIPProcessor

    tokenizer, vocabulary = captions_tokenizer(captions)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": vocabulary, "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}
    mit = {"mit_hidden_size": 32, "mit_intermediate_size": 48, "mit_num_hidden_layers": 1, "mit_num_attention_heads": 2}
    vision = {**tower, "image_size": 32, "patch_size": 8, "num_frames": 8, **mit}
    config = XCLIPConfig(
        text_config=text, vision_config=vision, projection_dim=32, prompt_layers=1, prompt_num_attention_heads=2
    )
    torch.manual_seed(0)
    XCLIPModel(config).save_pretrained(folder)
    images = VideoMAEImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    XCLIPProcessor(images, tokenizer).save_pretrained(folder)
