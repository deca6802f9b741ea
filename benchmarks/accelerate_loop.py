"""The same training with Hugging Face Accelerate, as its documentation writes a loop."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
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
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if workload.precision == "bf16" else "no",
        gradient_accumulation_steps=ACCUMULATION_STEPS,
        # The schedule is laid out in optimizer steps, the same at any number of ranks.
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    dataset = make_dataset(workload.num_samples)
    loader = DataLoader(dataset, workload.micro_batch_size, shuffle=True, drop_last=True)
    model = make_model(workload.width, workload.layers)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, workload.num_steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    num_steps = 0
    while num_steps < workload.num_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                num_steps += 1
                tick()
                if num_steps == workload.num_steps:
                    break
    accelerator.end_training()
