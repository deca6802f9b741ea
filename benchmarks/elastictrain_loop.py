"""The same training with our built-in loop, put together by `Job` as for a user, with everything on.

What differs from `elastictrain run` is who starts the process: the benchmark does, so that it can take turns.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
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

from elastictrain.config.schema import JobConfig
from elastictrain.logs import make_logger
from elastictrain.protocol import Group, RunSpec
from elastictrain.training.device import process_group
from elastictrain.training.job import Job
from elastictrain.training.session import Session


class BenchmarkTask:
    def __init__(self, width: int, layers: int, num_samples: int) -> None:
        self.width, self.layers, self.num_samples = width, layers, num_samples

    def model(self) -> nn.Module:
        return make_model(self.width, self.layers)

    def train_data(self) -> Dataset[Any]:
        return make_dataset(self.num_samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return make_optimizer(model)

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler:
        return make_scheduler(optimizer, num_steps)


def job_of(workload: Workload, overrides: Mapping[str, Mapping[str, Any]]) -> JobConfig:
    """The job file a user would write for this workload; whatever it does not name is our default.

    Args:
        workload: what to train.
        overrides: sections merged over the job, such as `{"data": {"seed_samples": False}}`, for experiments.
    """
    job: dict[str, Any] = {
        "name": f"benchmark-{workload.name}",
        "task": "elastictrain_loop:BenchmarkTask",
        "params": {"width": workload.width, "layers": workload.layers, "num_samples": workload.num_samples},
        "train": {
            "max_steps": workload.num_steps,
            "micro_batch_size": workload.micro_batch_size,
            "accumulation_steps": ACCUMULATION_STEPS,
            "precision": workload.precision,
            "clip_norm": CLIP_NORM,
        },
        "elastic": {"device": "cpu", "nproc_per_node": int(os.environ["WORLD_SIZE"]), "threads_per_rank": 1},
    }
    for section, values in overrides.items():
        job[section] = {**job.get(section, {}), **values}
    return JobConfig.model_validate(job)


def train(workload: Workload, tick: Tick, overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> None:
    config = job_of(workload, overrides)
    with (
        tempfile.TemporaryDirectory(prefix="elastictrain-benchmark-") as state_dir,
        process_group(device="cpu", num_threads=config.elastic.threads_per_rank) as place,
    ):
        session = Session(place, seed=config.seed)
        session.on_settled(lambda _applied, _counters: tick())
        log = make_logger(stamp=lambda: {"step": session.global_step}, rank=place.rank, incarnation=1)
        spec = RunSpec(
            incarnation=1,
            state_dir=state_dir,
            job_dir=str(Path(__file__).parent),
            config=config.model_dump(mode="json"),
            kept_global_batch_size=None,
            run_id="00000000",
            source=None,
            allowed_differences=[],
            mean_time_between_failures_s=3600.0,
            group=Group.alone("benchmark-1", world_size=place.world_size, host="localhost"),
        )
        Job(spec, session, log).run()
