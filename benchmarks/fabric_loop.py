"""The same training with Lightning Fabric, as its documentation writes a loop."""

from __future__ import annotations

import os

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
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


def train(workload: Workload, tick: Tick) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if world_size > 1 else "auto",
        precision="bf16-mixed" if workload.precision == "bf16" else "32-true",
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    dataset = make_dataset(workload.num_samples)
    model = make_model(workload.width, workload.layers)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, workload.num_steps)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(dataset, workload.micro_batch_size, shuffle=True, drop_last=True),
    )

    num_steps = num_microbatches = 0
    while num_steps < workload.num_steps:
        for batch in loader:
            num_microbatches += 1
            is_accumulating = num_microbatches % ACCUMULATION_STEPS != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                with fabric.autocast():
                    loss = loss_of(model, batch) / ACCUMULATION_STEPS
                fabric.backward(loss)
            if is_accumulating:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            num_steps += 1
            tick()
            if num_steps == workload.num_steps:
                break
