"""The loop a careful user writes by hand: autocast, accumulation, DDP, no_sync, clipping, fused AdamW, a scheduler.

It is the measure of all others, so it does what they do to the weights and nothing besides: no metrics, no checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
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
    torch.manual_seed(0)
    dataset = make_dataset(workload.num_samples)
    model = make_model(workload.width, workload.layers)
    sampler = None
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, workload.micro_batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, workload.num_steps)
    use_autocast = workload.precision == "bf16"

    batches = endless(loader, sampler)
    for _ in range(workload.num_steps):
        for number in range(ACCUMULATION_STEPS):
            batch = next(batches)
            is_last = number == ACCUMULATION_STEPS - 1
            with nullcontext() if is_last or world_size == 1 else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=use_autocast):
                    loss = loss_of(model, batch) / ACCUMULATION_STEPS
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        tick()

    if world_size > 1:
        dist.destroy_process_group()


def endless(loader: DataLoader, sampler: DistributedSampler | None) -> Iterator:
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1
