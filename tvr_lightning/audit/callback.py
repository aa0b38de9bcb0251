"""Leakage audit after an evaluation, as a Lightning callback."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from tvr_lightning.audit.run import audit_method
from tvr_lightning.data.records import SplitName
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.methods.base import RetrievalModule


class LeakageAudit(Callback):
    """Callback that audits the method after a test or a separate validation and adds its result to the evaluation."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Audit on the test split."""
        self._audit(trainer, pl_module, "test")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Audit on the validation split, except during training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._audit(trainer, pl_module, "val")

    def _audit(self, trainer: Trainer, method: LightningModule, split: SplitName) -> None:
        if not isinstance(method, RetrievalModule) or method.evaluation is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        config, data = method.evaluation_config, trainer.datamodule  # type: ignore[attr-defined]
        if not config.audit:
            return
        try:
            method.evaluation.audit = audit_method(method, data, config.audit, config.seed, split).result
        except Exception as error:  # noqa: BLE001  the evaluation is done; its table says that the audit stopped
            method.evaluation.audit = AuditResult(passed=False, problem=f"{type(error).__name__}: {error}")
