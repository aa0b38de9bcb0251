"""The equations of NCL, in the paper's order (Park et al., section 3).

S (N, M) are cosines of texts and videos (Eq. 1), gamma is the temperature. InfoNCE (Eq. 4) is in `training/losses.py`,
the normalisation error (Eq. 5) in `evaluation/normalization.py`. Sinkhorn's algorithm (Eqs. 8 to 11, Fig. 4), which
normalises at test as well, is in `layers/sinkhorn.py`.
"""

from __future__ import annotations

from torch import Tensor

from tvr_lightning.layers.sinkhorn import sinkhorn_biases


def normalized_logits(logits: Tensor, iterations: int = 4, detach: bool = True, scale: Tensor | float = 1.0) -> Tensor:
    """Add Sinkhorn's biases to logits: (<t_i, v_j> + a_i + b_j) / gamma (Eqs. 10 to 12 and Fig. 4).

    In the softmax over videos a_i cancels, in that over texts b_j does, so that one matrix serves both directions.

    Args:
        logits: (B, B) scores of B texts against their B videos, divided by gamma.
        iterations: of Sinkhorn's algorithm, at least 1.
        detach: take a and b as constants; otherwise the gradient runs through the iterations.
        scale: 1 / gamma that the logits were scaled by. With `detach`, a and b are constants on the scale of a cosine,
            so that the gradient of the temperature sees them.

    Returns:
        (B, B).

    Raises:
        ValueError: `iterations` is below 1, or there is nothing to balance.
    """
    text_bias, video_bias = sinkhorn_biases(logits.detach() if detach else logits, 1.0, iterations)  # Eqs. 8 to 11
    biases = text_bias[:, None] + video_bias
    if detach and isinstance(scale, Tensor):
        biases = biases * (scale / scale.detach())
    return logits + biases  # Eq. 12, in the softmaxes of Eqs. 2 and 3, hence the loss of Eq. 4
