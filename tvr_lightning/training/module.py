"""Base class of all models that recipes build: plain hyperparameters, checked checkpoints, and the optimizer."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tvr_lightning.data.base import Needs, TextVideoDataModule
from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders.base import Encoder, FeatureEncoder, fingerprint
from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.extract.fingerprint import check_store
from tvr_lightning.option_types import Role, hints_of, parts_of
from tvr_lightning.training.callback_checks import check_callbacks, check_monitors
from tvr_lightning.training.checkpoints import FROZEN, CheckpointError, read_checkpoint
from tvr_lightning.training.loss_check import LossCheck, check_weights
from tvr_lightning.training.optim import (
    OptimizerConfig,
    Schedule,
    build_optimizer,
    check_optimizer_options,
    parameter_groups,
)
from tvr_lightning.training.options import flat_options, other_options, plain_options
from tvr_lightning.training.sharding import is_sharded, shard


def check_trainer(precision: str, strategy: str) -> None:
    """Reject precisions that store weights in 16 bits, because methods score in float32, and FSDP1."""
    if precision in ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16"):
        raise UserError(
            f"trainer.precision {precision} stores all weights in 16 bits, but methods score in float32. "
            "Use bf16-mixed or 32-true"
        )
    if "fsdp" in strategy.lower():
        raise UserError(
            f"trainer.strategy {strategy} (FSDP1) cannot clip the norm of gradients. Use FSDP2, as "
            "recipes/hardware/fsdp8-bf16.yaml does."
        )


def record_options(built: LightningModule | LightningDataModule, options: dict[str, Any]) -> None:
    """Record the plain options of a method or its data as its hyperparameters, which checkpoints contain."""
    # The instantiator lets load_from_checkpoint build classes from these options, as for a recipe.
    options["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
    built.hparams.clear()
    built.save_hyperparameters(options, logger=False)  # the loggers get those of both without nesting


class RecipeModule(LightningModule):
    """Model with an encoder of texts and videos, trained by a recipe.

    The constructor arguments of all subclasses are its hyperparameters, stored as plain values, so that checkpoints
    load without running code. An encoder that was built in Python is not a hyperparameter, because it has no text form.

    Args:
        optimizer: optimizer, learning rates, and schedule.
    """

    encoder: Encoder
    words: int
    frames: int
    monitor = "val/t2v_R@1"  # metric that selects the best checkpoint
    whole_checkpoints = False  # whether checkpoints contain frozen weights that are also in an encoder's file or tag
    logged_metrics: Sequence[str] = ()  # names of the metrics of an evaluation, without their stage
    resizes_buffers = False  # whether buffers change their size during training
    trains_all_parameters = True  # whether every trainable parameter gets a gradient in every step, as DDP requires

    def __init__(self, optimizer: Annotated[OptimizerConfig | None, Role.TRAINING] = None) -> None:
        super().__init__()
        # Lightning would warn of modules among the arguments, and copy them.
        self.save_hyperparameters(ignore=self.module_arguments(), logger=False)
        record_options(self, plain_options(dict(self.hparams)))
        self.optimizer_config = optimizer or OptimizerConfig()
        self.loss_check = LossCheck()

    @classmethod
    def module_arguments(cls) -> list[str]:
        """Return the arguments of the constructor that can be modules."""
        classes = {name: filter(inspect.isclass, parts_of(hint)) for name, hint in hints_of(cls).items()}  # type: ignore[arg-type]
        return [name for name, kinds in classes.items() if any(issubclass(kind, nn.Module) for kind in kinds)]

    @property
    def title(self) -> str:
        """Return the name used in tables and folder names."""
        return type(self).__name__

    @property
    def lr(self) -> float:
        """Peak learning rate of all parameters that are not pretrained, which Lightning's tuner finds and sets."""
        return self.optimizer_config.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        self.optimizer_config = replace(self.optimizer_config, lr=float(rate))
        self.hparams["optimizer"] = plain_options(self.optimizer_config)
        for running in self._trainer.lr_scheduler_configs if self._trainer else ():
            if isinstance(running.scheduler, Schedule):
                running.scheduler.base_lrs = [group["lr"] for group in parameter_groups(self, self.optimizer_config)]

    def hyperparameters(self) -> dict[str, Any]:
        """Return the options of model, optimizer, and data for loggers, by their names in recipes."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        options: dict[str, Any] = {}
        for section, part in {"model": self, "data": data}.items():
            if isinstance(part, RecipeModule | TextVideoDataModule):
                given = {name: value for name, value in part.hparams.items() if not name.startswith("_")}
                given |= {"optimizer": plain_options(self.optimizer_config)} if part is self else {}
                found = {"class_path": f"{type(part).__module__}.{type(part).__qualname__}", "init_args": given}
                options |= flat_options(section, found)
        return options

    @override
    def configure_callbacks(self) -> list[Callback]:
        # The first hook of all; later ones are called after those of the callbacks.
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_callbacks(self.trainer, self.resizes_buffers)
            validated = [f"val/{name}" for name in self.logged_metrics]
            check_monitors(self.trainer, self, validated if self.trainer.enable_validation else ())
        return []

    @override
    def setup(self, stage: str) -> None:
        check_trainer(str(self.trainer.precision), type(self.trainer.strategy).__name__)
        needed = getattr(self, "needs_frames", True), getattr(self, "needs_patches", False)
        self.encoder.check_vectors(self.title, *needed)
        self.encoder.check_frames(self.frames)
        precision = self.encoder.encoder_precision
        self.encoder.check_trainer(
            str(self.trainer.precision), type(self.trainer.strategy).__name__, encoder_precision=precision
        )
        if stage == "fit" and precision == "float16" and self.trainer.strategy.root_device.type == "cpu":
            rank_zero_info(
                "encoder_precision float16 is slow on a CPU. Add recipes/variants/float32.yaml to train in float32."
            )

    @property
    def needs(self) -> Needs:
        """Requirements of the model for its data, which asks for them in `setup`."""
        uses_audio = getattr(self, "audio_encoder", None) is not None
        return Needs(self.encoder.caption_tokens(self.words), getattr(self, "needs_patches", False), uses_audio)

    def check_inputs(self) -> None:
        """Check that stored features come from these encoders with their weights, or that frames are made for them."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TextVideoDataModule):
            return
        if data.features is not None:
            rank_zero_info(check_store(data.store, self.encoder, getattr(self, "audio_encoder", None)))
            return
        needed = vars(replace(self.encoder.preparation, antialias=data.preparation.antialias)).items()
        wrong = (needed | {("frames", self.frames)}) - (vars(data.preparation).items() | {("frames", data.frames)})
        if wrong:
            options = ", ".join(f"{name}={value!r}" for name, value in sorted(wrong))
            raise UserError(f"{type(data).__name__} reads other frames than {self.title} needs. Pass it {options}.")

    # These hooks follow the loading of a checkpoint.
    on_test_start = on_predict_start = check_inputs

    @override
    def on_fit_start(self) -> None:
        self.check_inputs()
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self.hyperparameters())

    @override
    def on_validation_start(self) -> None:
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            self.check_inputs()

    @override
    def predict_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.validation_step(batch, batch_idx, dataloader_idx)
        return batch.index  # Lightning expects a value

    @override
    def on_validation_epoch_end(self) -> None:
        self._evaluate("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._evaluate("test")

    def _evaluate(self, stage: Literal["val", "test"]) -> None:
        """Compute and log the results of what `validation_step` and `test_step` encoded."""
        raise NotImplementedError

    @override
    def configure_model(self) -> None:
        if self.device_mesh is not None:
            half = str(self.trainer.precision) == "bf16-mixed"
            shard(self, self.device_mesh["data_parallel"], torch.bfloat16 if half else torch.float32)
            self.strict_loading = False  # on_load_checkpoint compares the names

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.trainer.estimated_stepping_batches
        epochs = self.trainer.max_epochs
        if math.isinf(steps):  # trainer.max_time ends the run
            self.trainer.fit_loop.setup_data()
            steps = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
            epochs = 1
        optimizer, scheduler = build_optimizer(
            self,
            self.optimizer_config,
            total_steps=int(steps),
            epochs=epochs,
            # Lightning does not clip the gradients of a fused optimizer under mixed precision.
            fused=not (self.trainer.gradient_clip_val and isinstance(self.trainer.precision_plugin, MixedPrecision)),
        )
        if not is_sharded(self):  # FSDP2 matches names itself
            optimizer.register_load_state_dict_pre_hook(partial(_ordered_by_name, self))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = type(self).__name__
        saved = checkpoint.get("hyper_parameters", {})
        kind = str(saved.get("_class_path", own)).rpartition(".")[2]
        if kind != own:
            raise CheckpointError(f"the checkpoint contains {kind}, but the recipe builds {own}")
        if is_sharded(self):  # ModelParallelStrategy has loaded the weights already
            checkpoint = read_checkpoint(Path(str(self.trainer.ckpt_path)))
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            if "optimizer_states" not in checkpoint:
                raise CheckpointError(
                    f"{self.trainer.ckpt_path} contains weights only, so no training can resume from it. Name a "
                    "checkpoint with the state of its optimizer, such as last.ckpt of a run."
                )
            check_optimizer_options(str(self.trainer.ckpt_path), saved, dict(self.hparams))
        if FROZEN in checkpoint:
            add_frozen_weights(checkpoint, self)
        expected, found = (
            {name: tuple(tensor.shape) for name, tensor in state.items()}
            for state in (self.state_dict(), checkpoint["state_dict"])
        )
        wrong = [
            f"{name} has shape {found.get(name, 'none')}, expected {expected.get(name, 'none')}"
            for name in expected | found
            if found.get(name) != expected.get(name)
        ]
        if wrong:
            options = other_options(saved, dict(self.hparams))
            made = f"It was trained with {', '.join(options)}. " if options else ""
            built = sorted({name.partition(".")[0] for name in wrong} & {*self.module_arguments()} - saved.keys())
            raise CheckpointError(
                f"the checkpoint does not fit this {own}: {abbreviated(wrong, separator='; ')}. {made}"
                f"Use the {' and '.join(built) or 'recipe and options'} that it was trained with."
            )

    def load_weights(self, checkpoint: dict[str, Any]) -> None:
        """Load the weights and buffers of the contents of a checkpoint, or raise a CheckpointError if they differ."""
        self.on_load_checkpoint(checkpoint)
        self.load_state_dict(checkpoint["state_dict"])

    def total_loss(self, terms: Mapping[str, Tensor], batch: PairBatch) -> Tensor:
        """Return the sum of the terms of a loss, and queue them for a check before the optimizer step."""
        self.loss_check.start(terms, batch.video.video_id)
        return torch.stack([term.reshape(()) for term in terms.values()]).sum()

    @override
    def on_train_start(self) -> None:
        self.encoder.train()  # which a frozen encoder ignores; Lightning leaves the modes as they are
        # Log at least once per epoch, so that short runs have curves too.
        steps = self.trainer.num_training_batches // self.trainer.accumulate_grad_batches
        every = min(self.trainer.log_every_n_steps, max(steps, 1))  # type: ignore[attr-defined]
        self.trainer.log_every_n_steps = int(every)  # type: ignore[attr-defined]

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # A GradScaler expects infinite gradients and skips their steps.
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        self.loss_check.finish(self, gradients=not scaled)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loss_check.finish(self)  # the loss of an accumulated step may still be pending
        check_weights(self, checkpoint["state_dict"])
        if not self.whole_checkpoints:
            remove_frozen_weights(checkpoint, self)
        if checkpoint.get("optimizer_states"):  # not in checkpoints of weights alone
            for state, optimizer in zip(checkpoint["optimizer_states"], self.trainer.optimizers, strict=True):
                _name_parameters(state, self, optimizer)


def _name_parameters(state: dict[str, Any], module: nn.Module, optimizer: Optimizer) -> None:
    """Replace the numbers of parameters in an optimizer state by names, since only those are the same under FSDP2.

    FSDP2 numbers all parameters of a module, other strategies only those of the optimizer, group by group.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    if not is_sharded(module):
        names = {parameter: names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    numbered = list(names.values())
    if state:  # FSDP2 collects the state in the first process
        state["state"] = {numbered[number]: value for number, value in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [numbered[number] for number in group["params"]]


def _ordered_by_name(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the names of parameters in the order of an optimizer, and with the options of its groups."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]
    own, saved = ({name for group in part for name in group["params"]} for part in (groups, state["param_groups"]))
    if own != saved:
        raise CheckpointError(
            f"the checkpoint trains other parameters than this recipe: {abbreviated(sorted(own ^ saved))}. Use the "
            "recipe and options that it was trained with."
        )
    return state | {"param_groups": groups}


def remove_frozen_weights(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Replace frozen weights of encoders by their digest, if most weights of a method are frozen.

    Random weights, and those of encoders that the options do not describe, are kept, since they cannot be loaded again.
    """
    parameters = dict(module.named_parameters())
    frozen = {name: parameter.numel() for name, parameter in parameters.items() if not parameter.requires_grad}
    if 2 * sum(frozen.values()) <= sum(parameter.numel() for parameter in parameters.values()):
        return
    encoders = [name for name, part in module.named_modules() if isinstance(part, FeatureEncoder)]
    pretrained = tuple(f"{name}." for name in encoders if _is_pretrained(checkpoint.get("hyper_parameters", {}), name))
    state = checkpoint["state_dict"]  # with FSDP2, only that of the first process has tensors
    removed = {name: state.pop(name) for name in frozen if name.startswith(pretrained) and name in state}
    if removed:
        checkpoint[FROZEN] = fingerprint({}, removed)


def add_frozen_weights(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Complete a checkpoint with the frozen weights of a module, which was built as for a new training.

    Raises:
        CheckpointError: These are not the weights that the checkpoint was trained with.
    """
    missing = {name: value for name, value in module.state_dict().items() if name not in checkpoint["state_dict"]}
    if fingerprint({}, missing) != checkpoint[FROZEN]:
        raise CheckpointError(
            "the checkpoint contains only what was trained, and the frozen weights of this encoder are not those of "
            "its training. Set encoder.weights to the file or tag, and encoder_precision to the value, of the training."
        )
    checkpoint["state_dict"] = {**checkpoint["state_dict"], **missing}


def _is_pretrained(options: dict[str, Any], encoder: str) -> bool:
    """Return whether the options of a module name the weights of one of its encoders, such as `method.encoder`."""
    for name in encoder.split("."):
        section = options.get(name)
        options = (section.get("init_args") or {}) if isinstance(section, dict) else {}
    return pretrained_weights(options) is not None


def pretrained_weights(options: dict[str, Any]) -> str | None:
    """Return the pretrained weights that the options of an encoder name, or None."""
    named = options.get("weights"), options.get("trained_in"), options.get("model")
    return next((name for name in named if name not in (None, "none")), None)
