"""Options that an authors' checkpoint determines, and the sizes that it names."""

import pytest
import torch
from parity.case import load_case

from tvr_lightning.authors.convert import import_checkpoint
from tvr_lightning.errors import UserError


@pytest.mark.parametrize("temporal", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_drl_may_have_one_to_three_layers_per_weight_and_no_temporal_transformer(parity_cases, layers, temporal):
    clip = load_case(parity_cases / "clip4clip_seqTransf.safetensors").checkpoint
    clip = {name: tensor for name, tensor in clip.items() if temporal or not name.startswith("transformerClip.")}
    names = ["0.", "2.", "4."][:layers] if layers > 1 else [""]
    for side in ("text", "video"):
        for name in names:
            outputs = 1 if name == names[-1] else 64
            clip[f"{side}_weight_fc.{name}weight"] = torch.randn(outputs, 64)
            clip[f"{side}_weight_fc.{name}bias"] = torch.randn(outputs)
    module = import_checkpoint(clip, "file", words=12, frames=6)
    assert (module.temporal is not None) is temporal
    network = module.head.word_weights if layers == 1 else module.head.word_weights[-1]
    assert torch.equal(network.weight, clip[f"text_weight_fc.{names[-1]}weight"])


def test_gare_may_have_no_temporal_transformer(parity_cases):
    checkpoint = load_case(parity_cases / "gare.safetensors").checkpoint
    msvd = {name: tensor for name, tensor in checkpoint.items() if not name.startswith("transformerClip.")}
    module = import_checkpoint(msvd, "file", words=12, frames=6)
    assert module.temporal is None
    assert torch.equal(module.head.psi.q_proj.weight, msvd["psi.layers.0.cross_attn.q_proj.weight"])


def test_a_checkpoint_for_other_words_and_frames_is_rejected_with_its_sizes(parity_cases):
    checkpoint = load_case(parity_cases / "xclip_meanP.safetensors").checkpoint
    with pytest.raises(UserError, match=r"for 12 words and 6 frames, not for 32 words and 12 frames. Pass --words 12"):
        import_checkpoint(checkpoint, "file")
