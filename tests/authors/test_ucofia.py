"""UCoFiA's checkpoints of twelve vision blocks, whose last two attentions are saved as `attn.net.*`."""

import pytest
import torch
from parity.case import load_case
from parity.restated import Sizes, random_checkpoint

from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.data.batch import Media
from tvr_lightning.errors import UserError

WRAPPED = "clip.visual.transformer.resblocks.11.attn.net.in_proj_bias"


@pytest.fixture(scope="module")
def plain(parity_cases):
    """A small CLIP of twelve vision blocks with a recorded head for 6 words and 4 frames."""
    head = load_case(parity_cases / "ucofia_train.safetensors").checkpoint
    sizes = Sizes(dimension=len(head["global_mat_weight"]), vision_layers=12, text_layers=1, patch=4, side=16)
    unused = {name for name in head if name.startswith(("clip.", "transformerClip.", "frame_position"))}
    clip = {name: 0.5 * tensor for name, tensor in random_checkpoint(sizes, "meanP").items()}
    return clip | {name: tensor for name, tensor in head.items() if name not in unused}


def saved(plain):
    """Names as the released code saves them."""
    wrapped = tuple(f"clip.visual.transformer.resblocks.{number}." for number in (10, 11))
    return {
        name.replace(".attn.", ".attn.net.") if name.startswith(wrapped) else name: tensor
        for name, tensor in plain.items()
    }


def frames_of(module):
    pixels = torch.randint(0, 256, (2, 4, 3, 16, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    with torch.no_grad():
        return module.encoder.encode_media(Media(pixels, torch.ones(2, 4).bool()), patches=True)


def test_the_wrapped_attentions_are_read_and_shift(plain):
    made = import_checkpoint(saved(plain), "file", words=6, frames=4)
    without = import_checkpoint(plain, "file", words=6, frames=4)
    assert made.encoder.patch_shift is not None
    assert without.encoder.patch_shift is None
    theirs = plain["clip.visual.transformer.resblocks.11.attn.in_proj_bias"]
    assert torch.equal(made.encoder.clip.visual.transformer.resblocks[11].attn.in_proj_bias, theirs)
    assert (frames_of(made).frames - frames_of(without).frames).abs().max() > 1e-3


def test_the_released_evaluation_takes_the_attentions_of_openai_and_no_l1(plain):
    openai = {name.removeprefix("clip."): torch.zeros_like(tensor) for name, tensor in plain.items()}
    made = import_checkpoint(saved(plain), "file", words=6, frames=4, openai=openai)
    blocks = made.encoder.clip.visual.transformer.resblocks
    assert not any(tensor.any() for block in blocks[10:] for tensor in block.attn.state_dict().values())
    assert all(tensor.any() for tensor in blocks[9].attn.state_dict().values())
    assert made.head.patch_matrix is None
    assert made.options.patch_selection.noise_eval
    with pytest.raises(UserError, match=r"OpenAI's CLIP has no clip\.visual\.transformer\.resblocks\.10\.attn"):
        import_checkpoint(saved(plain), "file", words=6, frames=4, openai={})


def test_one_plain_attention_beside_a_wrapped_one_is_named(plain):
    mixed = saved(plain)
    mixed[WRAPPED.replace(".net", "")] = mixed[WRAPPED]
    with pytest.raises(UserError, match=r"unexpected .* clip\.visual\..*\.11\.attn\.in_proj_bias"):
        import_checkpoint(mixed, "file", words=6, frames=4)


def test_another_wrapped_block_is_refused_by_name(plain):
    mixed = saved(plain)
    mixed[WRAPPED.replace("11", "9")] = mixed.pop(WRAPPED.replace("11", "9").replace(".net", ""))
    with pytest.raises(UserError, match=r"resblocks\.9\.attn\.net\.in_proj_bias"):
        import_checkpoint(mixed, "file", words=6, frames=4)


def test_the_evaluation_codes_predictor_goes_without_l1(plain):
    size = len(plain["local_mat_weight1"])
    shapes = {"in_conv.0.weight": (2 * size,), "in_conv.0.bias": (2 * size,), "in_conv.1.weight": (size, 2 * size)}
    shapes |= {"out_conv.0.weight": (size, 2 * size), "out_conv.2.weight": (1, size)}
    predictor = {f"visual_token_selector.score_predictor.{name}": torch.randn(shape) for name, shape in shapes.items()}
    made = import_checkpoint(saved(plain) | predictor, "file", words=6, frames=4)
    assert made.head.patch_matrix is None
    assert made.options.patch_selection.predictor == "eval-t2v"
