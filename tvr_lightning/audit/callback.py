"""Leakage audit after an evaluation, as a Lightning callback."""

import secrets
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from tvr_lightning.audit.run import audit_method
from tvr_lightning.audit.state import State
from tvr_lightning.data.records import SplitName
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.training.distributed import alone
from tvr_lightning.training.sharding import is_sharded

SECONDS = 600.0  # after which an audit stops, since other devices wait for it


class LeakageAudit(Callback):
    """Callback that audits the method after a test or a separate validation and adds its result to the evaluation.

    The state of the method before the evaluation is recorded, so that what it remembers from there is found.
    """

    def __init__(self) -> None:
        self._before: tuple[State | None, Any] | None = None

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (
            isinstance(pl_module, RetrievalModule)
            and pl_module.evaluation_config.audit > 0
            and not trainer.fast_dev_run  # type: ignore[attr-defined]
        ):
            # Sharded parameters change their form when they are used.
            self._before = None if is_sharded(pl_module) else State(pl_module), pl_module.evaluation

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.on_test_start(trainer, pl_module)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._audit(trainer, pl_module, "test")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._audit(trainer, pl_module, "val")

    def _audit(self, trainer: Trainer, method: LightningModule, split: SplitName) -> None:
        before, self._before = self._before, None
        evaluation: Any = method.evaluation
        if before is None or evaluation is None:
            return
        assert isinstance(method, RetrievalModule)
        state, method.evaluation = before  # the evaluation itself may change
        seed = trainer.strategy.broadcast(secrets.randbits(32))  # new in every audit, the same on every device
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        arguments = (method, data, method.evaluation_config.audit, seed, split, state)
        try:
            if is_sharded(method):  # all devices must compute together
                evaluation.audit = _result(*arguments)
            else:
                result = None
                if trainer.is_global_zero:
                    with alone():
                        result = _result(*arguments, SECONDS)
                evaluation.audit = trainer.strategy.broadcast(result)
        finally:
            method.evaluation = evaluation


def _result(*arguments: Any) -> AuditResult:
    try:
        return audit_method(*arguments).result
    except Exception as error:  # noqa: BLE001  the evaluation is done; its table says that the audit stopped
        return AuditResult(passed=False, problem=f"{type(error).__name__}: {error}")
