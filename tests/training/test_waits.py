"""A training step asks a device for numbers as seldom as can be: every question makes a GPU run dry."""

import collections
import traceback
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from quick_trainer import quick_trainer
from torch.utils._python_dispatch import TorchDispatchMode

from tvr_lightning.testing.small import method_recipes, small

RECIPES = Path(__file__).parents[2] / "recipes"
ASKING = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim",
    "unique_consecutive",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
METHODS = method_recipes(RECIPES)
KNOWN = {
    "DPDV": (6, "interactions.py"),  # lengths, once for each view of each path, to leave out what is not there
    "DRL": (2, "drl.py"),  # which tokens are real, of either side
    "GAID": (1, "whisper.py"),  # windows without sound are not encoded
}
"""Questions of a step, and the file that asks them."""


class Questions(TorchDispatchMode):
    """Counts operators whose result the host must wait for, by the file of the package that calls them."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        asks = name in ASKING
        if name in INDEXING:
            asks = any(place is not None and place.dtype in (torch.bool, torch.uint8) for place in arguments[1])
        if name == "repeat_interleave":
            asks = len(arguments) == 1 and "output_size" not in (named or {})
        if asks:
            files = [frame.filename for frame in traceback.extract_stack() if "tvr_lightning" in frame.filename]
            self.found[Path(files[-1]).name if files else name] += 1
        return function(*arguments, **(named or {}))


class DuringSteps(Callback):
    """Counts questions from the start of a batch to its end, the optimiser's step included."""

    def on_train_batch_start(self, *arguments):
        self.questions = Questions()
        self.questions.__enter__()

    def on_train_batch_end(self, *arguments):
        self.questions.__exit__(None, None, None)


OPTIONS = {
    "TCMGC": ("attention.dropout_per=video", "mask_words=true", "decorrelation.pairs=negatives"),
    "GARE": ("bottleneck.normalize=true",),
    "XPool": ("dropout_per=video",),
}


def asked(title, *overrides):
    """What two steps ask, by file."""
    method, data = small(METHODS[title], *overrides)
    watch = DuringSteps()
    quick_trainer(max_steps=2, limit_val_batches=0, callbacks=[watch]).fit(method, datamodule=data)
    return watch.questions.found


@pytest.mark.parametrize("title", METHODS)
def test_a_step_asks_the_device_only_what_is_known(title):
    found = asked(title)
    most, file = KNOWN.get(title, (0, ""))
    assert set(found) <= {file}
    assert found[file] <= most


@pytest.mark.parametrize(("title", "option"), [(title, option) for title in OPTIONS for option in OPTIONS[title]])
def test_options_ask_nothing_more(title, option):
    assert not asked(title, f"--model.init_args.{title.lower()}.{option}")


def test_questions_are_heard():
    numbers = torch.arange(4.0)
    with Questions() as heard:
        numbers[numbers > 1].sum().item()
        torch.repeat_interleave(torch.tensor([1, 2]))
    assert heard.found.total() == 3
