"""A training step synchronizes once with the device: a GPU waits at each synchronization."""

import collections
import traceback
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import method_recipes, small

SYNCHRONIZING = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim",
    "unique_consecutive",
}  # fmt: skip
COPIES = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
METHODS = method_recipes(Path(__file__).parents[2] / "recipes")
OPTIONS = {
    "TCMGC": ("tcmgc.mask_words=true", "tcmgc.decorrelation.pairs=negatives"),
    "GARE": ("gare.bottleneck.normalize=true",),
}


class Synchronizations(TorchDispatchMode):
    """Counts operators whose result the host must wait for, by the file of the package that calls them."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __enter__(self):
        self.copies = Copies(self)
        self.copies.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.copies.__exit__(*exception)

    def count(self, name):
        files = [frame.filename for frame in traceback.extract_stack() if "tvr_lightning" in frame.filename]
        self.found[Path(files[-1]).name if files else name] += 1

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        waits = name in SYNCHRONIZING
        if name in INDEXING:
            waits = any(place is not None and place.dtype in (torch.bool, torch.uint8) for place in arguments[1])
        if name == "repeat_interleave":
            waits = len(arguments) == 1 and "output_size" not in (named or {})
        if waits:
            self.count(name)
        return function(*arguments, **(named or {}))


class Copies(TorchFunctionMode):
    """Counts copies to the host, which have no operator on a CPU."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function in COPIES:
            self.watch.count(function.__name__)
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize(("title", "options"), [*((title, ()) for title in METHODS), *OPTIONS.items()])
def test_a_training_step_synchronizes_once_to_check_its_loss(title, options, monkeypatch):
    method, data = small(METHODS[title], *(f"--model.init_args.{option}" for option in options))
    monkeypatch.setattr("tvr_lightning.pairwise.tiles.FAST_LOOPS", ())  # as on other devices than a CPU
    watch = Synchronizations()
    method.on_train_batch_start = lambda *batch: watch.__enter__() and None
    method.on_train_batch_end = lambda *batch: watch.__exit__(None, None, None)
    quiet_trainer(max_steps=1, limit_val_batches=0).fit(method, datamodule=data)
    assert watch.found == {"loss_check.py": 1}


def test_synchronizations_are_counted():
    numbers = torch.arange(4.0)
    with Synchronizations() as watch:
        numbers[numbers > 1].sum().item()
        torch.repeat_interleave(torch.tensor([1, 2]))
        numbers.tolist()
        numbers.cpu()
    assert watch.found.total() == 5
