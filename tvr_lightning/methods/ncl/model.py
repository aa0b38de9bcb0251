"""The equations of NCL, in the paper's order (Park et al., section 3).

S (N, M) are cosines of texts and videos (Eq. 1), gamma is the temperature. InfoNCE (Eq. 4) is in `training/losses.py`,
the normalization error (Eq. 5) in `evaluation/normalization.py`. Sinkhorn's algorithm (Eqs. 8 to 11, Fig. 4), which is
also used at test time, is in `layers/sinkhorn.py`.
"""

from torch import Tensor

from tvr_lightning.layers.sinkhorn import sinkhorn_biases


def normalized_logits(logits: Tensor, iterations: int = 4, detach: bool = True, scale: Tensor | float = 1.0) -> Tensor:
    """Add Sinkhorn biases to logits (B, B): (<t_i, v_j> + a_i + b_j) / gamma (Eqs. 10 to 12 and Fig. 4).

    With `detach`, a and b are constants on the scale of a cosine, which still move the temperature.
    """
    text_bias, video_bias = sinkhorn_biases(logits.detach() if detach else logits, 1.0, iterations)  # Eqs. 8 to 11
    biases = text_bias[:, None] + video_bias
    if detach and isinstance(scale, Tensor):
        biases = biases * (scale / scale.detach())
    return logits + biases  # Eq. 12, in the softmaxes of Eqs. 2 and 3, hence the loss of Eq. 4
