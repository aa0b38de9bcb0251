"""Checks of a trainer's callbacks before training starts."""

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy

from tvr_lightning.errors import UserError, abbreviated

AVERAGING = (StochasticWeightAveraging, WeightAveraging)
"""Callbacks that replace the weights of the last step by an average."""


def check_callbacks(trainer: Trainer, resizes_buffers: bool) -> None:
    """Refuse callbacks that contradict each other, the strategy, or the module.

    `resizes_buffers` is whether the module stores features in buffers that grow during training.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averaging = [type(callback).__name__ for callback in callbacks if isinstance(callback, AVERAGING)]
    if len(averaging) > 1:
        raise UserError(f"trainer.callbacks: {' and '.join(averaging)} both average the weights. Keep one of them.")
    if averaging and isinstance(trainer.strategy, ModelParallelStrategy):
        raise UserError(
            f"trainer.callbacks: {averaging[0]} cannot average weights that ModelParallelStrategy shards. Remove it, "
            "or use trainer.strategy: ddp."
        )
    if resizes_buffers and any(isinstance(callback, WeightAveraging) for callback in callbacks):
        raise UserError(
            f"trainer.callbacks: {averaging[0]} cannot average the queues of NCL, whose size changes. Remove one of "
            "them, or use StochasticWeightAveraging."
        )
    if any(isinstance(callback, BackboneFinetuning) for callback in callbacks):
        raise UserError(
            "trainer.callbacks: BackboneFinetuning sets a learning rate of the encoder that the schedule of the recipe "
            "would replace. Set optimizer.encoder_lr and tuning, or derive a callback from BaseFinetuning."
        )


def check_monitors(trainer: Trainer, module: LightningModule, logged: Iterable[str]) -> None:
    """Refuse monitors that neither a module with the metrics `logged` nor a callback can log.

    Terms of losses are logged as `train/...`. Classes from elsewhere may log more, so their runs are not checked.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    kinds = {type(each) for each in (module, *callbacks)}
    own = ("tvr_lightning", "lightning")
    if LambdaCallback in kinds or any(kind.__module__.partition(".")[0] not in own for kind in kinds):
        return
    metrics = sorted(logged)
    for callback in callbacks:
        # Not a subclass: the run's own RunCheckpoint also exists in runs without validation.
        monitor = callback.monitor if type(callback) in (EarlyStopping, ModelCheckpoint) else None  # type: ignore[attr-defined]
        steps = ("step", "epoch") if isinstance(callback, ModelCheckpoint) else ()
        if monitor is not None and monitor not in (*metrics, *steps) and not monitor.startswith(("train/", "lr-")):
            raise UserError(
                f"trainer.callbacks: {type(callback).__name__} monitors {monitor}, which this run does not log. "
                f"Available: {abbreviated(metrics, 12) or 'no metrics'}, train/loss."
            )
