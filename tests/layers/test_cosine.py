import torch

from tvr_lightning.layers.cosine import unit


def test_vectors_get_length_one_and_zero_vectors_stay_finite():
    vectors = torch.randn(3, 4, 5)
    vectors[0, 0] = 0
    vectors.requires_grad_()
    made = unit(vectors)
    lengths = made.norm(dim=-1)
    assert lengths[0, 0] == 0
    torch.testing.assert_close(lengths.flatten()[1:], torch.ones(11))
    torch.testing.assert_close(made[1], vectors[1] / vectors[1].norm(dim=-1, keepdim=True))
    made.sum().backward()
    assert vectors.grad.isfinite().all()
