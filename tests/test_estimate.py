"""What `tvr fit --estimate` says before a run: it writes nothing, and a run takes about what it says."""

import re
import time
from pathlib import Path

import pytest
import torch

from tvr_lightning.cli import main
from tvr_lightning.recipe_files import RecipeError
from tvr_lightning.synthetic import synthesize
from tvr_lightning.verbs.estimate import Estimate, _activations, _kept, _of_size, _ParsedCLI, _read, estimate

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("fixture")
    synthesize("msrvtt", root, 40, 0, workers=1, progress=False)
    return root


def words(root: Path, *further: str) -> list[str]:
    return [
        f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={root}", "--data.init_args.num_workers=0", "--data.init_args.frames=3",
        "--data.init_args.batch_size=12", "--model.init_args.encoder.init_args.width=64", "--trainer.max_epochs=4",
        "--trainer.accelerator=cpu", *further,
    ]  # fmt: skip


def parsed(root: Path, *further: str) -> _ParsedCLI:
    return _ParsedCLI(args=words(root, *further), run=False)


def test_the_estimate_tells_what_a_run_needs_and_writes_nothing(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *words(root), "--estimate"]) == 0
    said = capsys.readouterr().out
    assert "CLIP4Clip on MSR-VTT: requirements of a run" in said
    assert "It fits in 24 GB; a device with 8 GB is enough." in said
    assert "estimated from small batches on the CPU" in said
    assert re.search(r"time: \d+\.\d minutes for 8 steps in 4 epochs", said)
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_those_of_the_method_and_the_run(root):
    cli = parsed(root, "--trainer.devices=2", "--trainer.max_steps=3")
    found = estimate(cli)
    assert found.parameters == sum(p.numel() for p in cli.model.parameters())
    assert (found.steps, found.epochs) == (3, 1.5)
    assert found.memory > 4 * (found.parameters + 3 * found.trained)
    assert found.clips_per_second > 0
    assert found.seconds >= found.steps * found.step_seconds


def test_activations_of_a_whole_batch_are_worked_out_from_small_ones(root):
    cli = parsed(root)
    estimate(cli)  # gives method and data their trainer
    method = cli.model.train()
    batch, _, _ = _read(cli.datamodule)
    torch.manual_seed(0)
    assert _activations(method, batch, 32) == pytest.approx(_kept(method, _of_size(batch, 32)), rel=0.1)


def test_what_does_not_fit_is_said():
    numbers = dict.fromkeys(Estimate.__dataclass_fields__, 1)
    big = Estimate(**{**numbers, "title": "A on B", "memory": 30e9, "checkpoints": 5e9, "room": 1e9, "device": "cpu"})
    said = "\n".join(big.lines())
    assert "It does not fit in 24 GB; a device with 40 GB is enough." in said
    assert "NOT ENOUGH" in said


def test_a_run_without_end_or_without_a_batch_is_refused(root):
    with pytest.raises(RecipeError, match=r"The run has no end\. Set trainer\.max_epochs"):
        estimate(parsed(root, "--trainer.max_epochs=-1"))
    with pytest.raises(RecipeError, match=r"Lower data\.init_args\.batch_size"):
        estimate(parsed(root, "--data.init_args.batch_size=64"))


@pytest.mark.slow
def test_a_run_takes_within_a_factor_of_two_of_its_estimate(root, tmp_path):
    further = ("--trainer.max_epochs=30", f"--results.directory={tmp_path}", "--trainer.enable_progress_bar=false")
    expected = estimate(parsed(root, *further)).seconds
    began = time.perf_counter()
    assert main(["fit", *words(root, *further)]) == 0
    taken = time.perf_counter() - began
    assert taken / 2 < expected < taken * 2
