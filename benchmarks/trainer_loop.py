"""The same training with Lightning Trainer, with all it would do besides switched off."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import lightning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from workload import (
    ACCUMULATION_STEPS,
    CLIP_NORM,
    Tick,
    Workload,
    loss_of,
    make_dataset,
    make_model,
    make_optimizer,
    make_scheduler,
)


class Module(lightning.LightningModule):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.model = make_model(workload.width, workload.layers)

    def training_step(self, batch: Any, _batch_index: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_gradient_clipping(self, _optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        # Trainer's own clipping refuses a fused optimizer under mixed precision; with bf16 there is nothing to unscale.
        nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = make_optimizer(self)
        scheduler = make_scheduler(optimizer, self.workload.num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StepEnded(lightning.Callback):
    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self.num_steps = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step > self.num_steps:
            self.num_steps = trainer.global_step
            self.tick()


def train(workload: Workload, tick: Tick) -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    world_size = int(os.environ["WORLD_SIZE"])
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(
        make_dataset(workload.num_samples), workload.micro_batch_size, shuffle=True, drop_last=True, num_workers=0
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if world_size > 1 else "auto",
        precision="bf16-mixed" if workload.precision == "bf16" else "32-true",
        accumulate_grad_batches=ACCUMULATION_STEPS,
        gradient_clip_val=CLIP_NORM,
        max_steps=workload.num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StepEnded(tick)],
    )
    trainer.fit(Module(workload), loader)
