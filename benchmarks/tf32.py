"""Effect of TF32 on the losses and gradients of a training step, computed without a GPU.

    python benchmarks/tf32.py

TF32 rounds the factors of a float32 product to ten bits of mantissa and sums in float32 (NVIDIA, Ampere architecture
whitepaper, 2020). This script rounds the factors of every matrix product of a head, forward and backward, on given
features with the papers' options and dropout, and one seed. Differences are lengths of the difference from float32,
relative to the length of the float32 result.
"""

from __future__ import annotations

import argparse
import platform
from datetime import date
from typing import Any

import pairwise
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.features import PairedFeatures
from tvr_lightning.methods import DRL, GARE, TCMGC, TMASS, XCLIP, CLIP4Clip, XPool

METHODS = {kind.__name__: kind for kind in (CLIP4Clip, DRL, GARE, TCMGC, TMASS, XCLIP, XPool)}
NIL = 1e-6
"""Share of all gradients below which a gradient is only rounding error, such as that of a bias before a softmax."""
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


def rounded(x: Any) -> Any:
    """Round a float32 tensor to the nearest values with ten bits of mantissa; return anything else unchanged."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        return x
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class Rounding(TorchDispatchMode):
    """A mode that rounds the factors of products."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Call an operator. The factors of a product are rounded, but not a term that is added to it."""
        if function.overloadpacket in PRODUCTS:
            arguments = (*arguments[:-2], *map(rounded, arguments[-2:]))
        return function(*arguments, **(named or {}))


def step(method: Any, pairs: PairedFeatures) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a step, and its gradients by name, including those of the features."""
    method.zero_grad()
    torch.manual_seed(1)
    inputs = {"frames": pairs.video.frames, "words": pairs.text.words, "sentence": pairs.text.sentence}
    for tensor in inputs.values():
        tensor.requires_grad_().grad = None
    loss = torch.stack(list(method.losses(pairs).values())).sum()
    loss.backward()
    named = dict(method.named_parameters()) | inputs
    return float(loss.detach()), {
        name: tensor.grad.clone() for name, tensor in named.items() if tensor.grad is not None
    }


def norms(gradients: dict[str, Tensor]) -> dict[str, float]:
    """Return the length of each gradient."""
    return {name: float(gradient.norm()) for name, gradient in gradients.items()}


def length(gradients: dict[str, Tensor]) -> float:
    """Return the length of all gradients together."""
    return float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def main() -> None:
    """Compare TF32 with float32, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--words", type=int, default=32)
    parser.add_argument("--frames", type=int, default=12)
    args = parser.parse_args()
    args.device = "cpu"
    torch.set_num_threads(1)
    print(f"{date.today()}, {platform.machine()}, torch {torch.__version__}, {args.pairs} pairs, D = {args.dimension}")
    columns = ["method", "loss", "difference of loss", "difference of all gradients"]
    print(f"| {' | '.join([*columns, 'largest difference of one gradient'])} |\n|---|---:|---:|---:|---|")
    for name in args.methods:
        torch.manual_seed(0)
        encoder = TinyClipEncoder(width=args.dimension, vision_layers=1, text_layers=4)
        method = METHODS[name](encoder, words=args.words, frames=args.frames).train()
        text, video = pairwise.features(args.pairs, args)
        video.patches = video.audio = video.audio_mask = None
        index = torch.arange(args.pairs)
        pairs = PairedFeatures(text, video, index, index)
        loss, exact = step(method, pairs)
        with Rounding():
            other, found = step(method, pairs)
        apart = {name: found[name] - gradient for name, gradient in exact.items()}
        whole = length(exact)
        shares = {name: length({name: apart[name]}) / norm for name, norm in norms(exact).items() if norm > NIL * whole}
        worst = max(shares, key=lambda name: shares[name])
        print(
            f"| {name} | {loss:.4f} | {abs(other - loss) / loss:.1e} | {length(apart) / whole:.1e} | "
            f"{shares[worst]:.1e} ({worst}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
