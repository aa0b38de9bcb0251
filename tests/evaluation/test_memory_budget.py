"""Memory budget for scores by device; the GPU's memory is given, because there may be no GPU."""

import pytest
import torch

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import GIB, MIB, memory_budget

GPU = torch.device("cuda", 0)


@pytest.fixture
def free(monkeypatch):
    """Function that sets the free memory of the GPU, and what torch has reserved and allocated of the rest."""

    def set_memory(unused, reserved=0, allocated=0):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (unused, 80 * GIB))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: reserved)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: allocated)
        memory_budget.__globals__["_free_quarter"].cache_clear()

    return set_memory


@torch.no_grad()
def test_a_gpu_gives_a_quarter_of_its_free_memory(free):
    free(40 * GIB)
    assert memory_budget(None, GPU) == 10 * GIB
    free(10 * GIB, reserved=20 * GIB, allocated=10 * GIB)
    assert memory_budget(None, GPU) == 5 * GIB
    free(140 * GIB)
    assert memory_budget(None, GPU) == 32 * GIB
    assert memory_budget(None, torch.device("cpu")) == 2 * GIB
    assert memory_budget(0.5, GPU) == GIB // 2


def test_the_budget_of_training_does_not_depend_on_the_free_memory(free):
    free(40 * GIB)
    assert memory_budget(None, GPU) == 2 * GIB


@torch.no_grad()
def test_a_gpu_without_free_memory_is_refused(free):
    free(100 * MIB)
    with pytest.raises(UserError, match="cuda:0 has only 100 MiB of free memory"):
        memory_budget(None, GPU)
