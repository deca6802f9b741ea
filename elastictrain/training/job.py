"""Puts a run together from its job: task, model, data, optimizer, loop. One rank's view, start to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from elastictrain.config.schema import JobConfig
from elastictrain.core.advice import Advice, batchnorm_advice, schedule_advice
from elastictrain.core.batch import BatchPlan, resolve_batch
from elastictrain.core.seeds import Stream, derive
from elastictrain.core.skips import SkipWatch
from elastictrain.core.window import EpochTail, WindowPlan
from elastictrain.errors import ConfigError, DataError
from elastictrain.logs import Logger
from elastictrain.protocol import METRICS_FILE, RunSpec
from elastictrain.training.data import SeededReader, batches
from elastictrain.training.device import Place
from elastictrain.training.ema import Ema
from elastictrain.training.evaluate import Evaluator
from elastictrain.training.inspection import inspecting, schedule_horizons
from elastictrain.training.loop import Limits, Loop, my_spans
from elastictrain.training.metrics import MetricsWriter
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.report import Reporter
from elastictrain.training.session import Session
from elastictrain.training.task import BoundTask, import_task
from elastictrain.training.timing import DeviceTimer
from elastictrain.training.update import Updater, make_optimizer


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, for the summary.

    Args:
        complete: all steps are done; False if it was stopped.
        reason: in words.
        global_batch_size: samples per step, which later starts keep.
        summary: counters, last values and totals, as plain data.
    """

    complete: bool
    reason: str
    global_batch_size: int
    summary: dict[str, Any]


class Adviser:
    """Logs each remark once."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._given: set[str] = set()

    def __call__(self, advice: Advice | None) -> None:
        if advice is not None and advice.key not in self._given:
            self._given.add(advice.key)
            self._log.warning("advice", about=advice.key, what=advice.what, hint=advice.hint)


def run_job(spec: RunSpec, session: Session, log: Logger) -> Outcome:
    """Trains one job on this rank.

    Args:
        spec: what the parent decided.
        session: a fresh session of this rank, in phase INIT.
        log: for events.
    """
    started_s = perf_counter()
    config = JobConfig.model_validate(spec.config)
    place = session.place
    batch = resolve_batch(
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        accumulation_steps=config.train.accumulation_steps,
        world_size=place.world_size,
        kept_global_batch_size=spec.kept_global_batch_size,
    )
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    advise: Callable[[Advice | None], None] = Adviser(log) if place.is_rank_zero else lambda _advice: None

    session.generators.seed(derive(session.seed, Stream.MODEL))
    task = BoundTask(import_task(config.task, Path(spec.job_dir) if spec.job_dir else None), config.params)
    train_data = task.build_train_data()
    eval_data = task.build_eval_data()
    session.generators.seed(derive(session.seed, Stream.MODEL))
    replica = Replica(task.build_model(), place, config.model, config.ddp)
    precision = Precision(config.train.precision, place.device, config.scaler, tf32=config.train.tf32)
    optimizer = task.build_optimizer(
        replica.module, lambda model: make_optimizer(model, config.optimizer, place.device)
    )
    ema = Ema(replica.module, config.model.ema_decay) if config.model.ema_decay is not None else None

    plan = WindowPlan(len(train_data), batch.global_batch_size, batch.micro_batch_size, config.data.epoch_tail)
    limits = Limits(plan, config.train.max_steps, config.train.max_epochs)
    if plan.epoch_tail is EpochTail.DROP and plan.length < plan.global_batch_size:
        raise DataError(
            f"the dataset has {len(train_data)} samples, fewer than one global batch of {batch.global_batch_size}, "
            'and data.epoch_tail = "drop" leaves them all out',
            'Use data.epoch_tail = "continue" or "partial", or a smaller train.global_batch_size.',
        )
    if config.ddp.static_graph and place.world_size > 1:
        _check_static_graph(plan, place)
    scheduler = task.build_scheduler(optimizer, limits.num_steps)
    _advise_before_start(advise, replica, scheduler, limits, batch, place, config)

    reader = SeededReader(
        train_data,
        seed=session.seed,
        stream=Stream.SAMPLE,
        shuffle=config.data.shuffle,
        seed_samples=config.data.seed_samples,
    )
    stream = batches(
        reader,
        task.collate,
        my_spans(session, plan, limits),
        num_workers=config.data.num_workers,
        prefetch_batches=config.data.prefetch_batches,
        pin_memory=config.data.pin_memory and place.device.type == "cuda",
    )
    if task.weight is None and place.is_rank_zero:
        stream = inspecting(stream, advise)
    state_dir = Path(spec.state_dir)
    writer = None
    if place.is_rank_zero:
        board_dir = state_dir / "tensorboard" if config.metrics.tensorboard else None
        writer = MetricsWriter(state_dir / METRICS_FILE, board_dir, log)
    timer = DeviceTimer(place.device)
    reporter = Reporter(
        session,
        timer,
        writer,
        log,
        incarnation=spec.incarnation,
        num_workers=config.data.num_workers,
        tokens_per_sample=task.tokens_per_sample,
        weight_is_tokens=task.weight is not None,
        max_steps=limits.num_steps,
        advise=advise,
    )
    loop = Loop(
        session=session,
        task=task,
        replica=replica,
        updater=Updater(
            optimizer,
            precision,
            clip_norm=config.train.clip_norm,
            check_gradients=config.train.check_gradients,
        ),
        precision=precision,
        scheduler=scheduler,
        optimizer=optimizer,
        ema=ema,
        evaluators=[
            Evaluator(
                name,
                dataset,
                task,
                place=place,
                precision=precision,
                micro_batch_size=config.eval.micro_batch_size or batch.micro_batch_size,
                seed=session.seed,
                channels_last=config.model.channels_last,
            )
            for name, dataset in eval_data.items()
        ],
        reporter=reporter,
        timer=timer,
        plan=plan,
        limits=limits,
        stream=stream,
        skip_watch=SkipWatch(config.train.max_consecutive_skips),
        report_every=config.metrics.every_steps,
        eval_every_steps=config.eval.every_steps,
        eval_every_epochs=config.eval.every_epochs,
        eval_with_ema=config.eval.use_ema,
        channels_last=config.model.channels_last,
    )
    log.info(
        "training_started",
        task=config.task,
        world_size=place.world_size,
        device=str(place.device),
        precision=precision.mode,
        parameters=sum(p.numel() for p in replica.module.parameters()),
        samples=len(train_data),
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        max_steps=limits.num_steps,
        startup_s=round(perf_counter() - started_s, 3),
    )
    try:
        complete = loop.run()
        if complete and config.eval.at_end:
            loop.evaluate()
        reason = "complete" if complete else f"stopped: {session.stop_reason}"
        totals = reporter.totals
        summary = {
            "kind": "summary",
            "step": session.global_step,
            "incarnation": spec.incarnation,
            "complete": complete,
            "reason": reason,
            "counters": asdict(session.counters),
            "epochs": session.sample_position / len(train_data),
            "max_steps": limits.num_steps,
            "world_size": place.world_size,
            "device": str(place.device),
            "precision": precision.mode,
            "last_loss": reporter.last_loss,
            "evaluation": loop.last_evaluation,
            "wall_s": perf_counter() - started_s,
            **asdict(totals),
        }
        if writer is not None:
            writer.write([summary])
    finally:
        stream.close()
        if writer is not None:
            writer.close()
    session.enter_exit()
    return Outcome(complete, reason, batch.global_batch_size, summary)


def _check_static_graph(plan: WindowPlan, place: Place) -> None:
    """torch counts each rank's backward passes of the first step, and expects as many reductions ever after."""
    full = plan.global_batch_size // plan.micro_batch_size
    short = plan.length % plan.global_batch_size if plan.epoch_tail is EpochTail.PARTIAL else 0
    if full == place.world_size and (short == 0 or -(-short // plan.micro_batch_size) == place.world_size):
        return
    raise ConfigError(
        "ddp.static_graph = true needs exactly one microbatch per rank and step, since torch cannot accumulate "
        f"gradients over a static graph; a step has {full} microbatches for {place.world_size} ranks",
        "Leave ddp.static_graph out, or make train.global_batch_size = train.micro_batch_size × ranks, with "
        'data.epoch_tail = "continue" or "drop".',
    )


def _advise_before_start(
    advise: Callable[[Advice | None], None],
    replica: Replica,
    scheduler: Any,
    limits: Limits,
    batch: BatchPlan,
    place: Place,
    config: JobConfig,
) -> None:
    advise(
        batchnorm_advice(
            replica.batchnorm_layers(),
            micro_batch_size=batch.micro_batch_size,
            world_size=place.world_size,
            synchronised=config.model.sync_batchnorm,
        )
    )
    advise(
        schedule_advice(
            schedule_horizons(scheduler),
            max_steps=limits.num_steps,
            microbatches_per_step=batch.num_microbatches,
            world_size=place.world_size,
        )
    )
