"""Puts a run together from its job: task, model, data, optimizer, loop. One rank's view, start to end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from elastictrain.config.schema import JobConfig
from elastictrain.core.advice import Advice, batchnorm_advice, schedule_advice
from elastictrain.core.batch import resolve_batch
from elastictrain.core.identity import DataIdentity
from elastictrain.core.phases import Phase
from elastictrain.core.seeds import Stream, derive
from elastictrain.core.skips import SkipWatch
from elastictrain.core.window import EpochTail, WindowPlan
from elastictrain.errors import DataError, StorageError, TaskError
from elastictrain.logs import Logger
from elastictrain.protocol import IMPORTS_FILE, METRICS_FILE, REPORTED_FILE, RunSpec
from elastictrain.training import imports
from elastictrain.training.checkpointing import Checkpointing, Kept
from elastictrain.training.data import batches
from elastictrain.training.ema import Ema
from elastictrain.training.evaluate import Evaluation, Evaluator
from elastictrain.training.feed import Feed, Limits, my_spans
from elastictrain.training.injection import drill_task, make_reader
from elastictrain.training.inspection import inspecting
from elastictrain.training.loop import Loop
from elastictrain.training.metrics import MetricsWriter
from elastictrain.training.metrics_tail import last_step_of
from elastictrain.training.past_evaluation import recall_evaluation
from elastictrain.training.peers import has_gone
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica, check_static_graph
from elastictrain.training.report import Reporter
from elastictrain.training.schedules import schedule_horizons
from elastictrain.training.session import Session
from elastictrain.training.shadow import Shadow
from elastictrain.training.state import TrainingState
from elastictrain.training.task import BoundTask, import_task
from elastictrain.training.timing import DeviceTimer
from elastictrain.training.trainee import Trainee
from elastictrain.training.update import Updater, make_optimizer


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, for the summary.

    Args:
        complete: all steps are done; False if it was stopped.
        reason: in words.
        summary: counters, last values and totals, as plain data.
    """

    complete: bool
    reason: str
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


class Job:
    """One rank's run: what is made of the job file, in the order in which one thing needs another.

    Args:
        spec: what the parent decided.
        session: a fresh session of this rank, in phase INIT.
        log: for events.
        await_group: waits until this rank is in its process group. Task and data need none, and are made before.
    """

    def __init__(
        self, spec: RunSpec, session: Session, log: Logger, *, await_group: Callable[[], None] = lambda: None
    ) -> None:
        self._started_s = perf_counter()
        self._spec = spec
        self._session = session
        self._place = session.place
        self._log = log
        self._advise: Callable[[Advice | None], None] = (
            Adviser(log) if session.place.is_rank_zero else lambda _advice: None
        )
        self._config = config = JobConfig.model_validate(spec.config)
        self._batch = resolve_batch(
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            accumulation_steps=config.train.accumulation_steps,
            world_size=session.place.world_size,
            kept_global_batch_size=spec.kept_global_batch_size,
        )
        if config.deterministic:
            # cuBLAS reads it when it is first used, and is refused without it (torch, use_deterministic_algorithms).
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        session.generators.seed(derive(session.seed, Stream.MODEL))
        self._task = BoundTask(import_task(config.task, Path(spec.job_dir) if spec.job_dir else None), config.params)
        drill_task(session, self._task)
        self._train_data = self._task.build_train_data()
        self._plan = WindowPlan(
            len(self._train_data),
            self._batch.global_batch_size,
            self._batch.micro_batch_size,
            config.data.epoch_tail,
        )
        self._limits = self._checked_limits()
        session.beat()
        await_group()
        session.beat()  # each of these may take long: a rank that gets from one to the next is no hang
        self._trainee = self._build_trainee()
        self._shadow = Shadow(self._trainee.replica.module, self._task, session.place.device)
        self._checkpointing = Checkpointing(spec, config, session, log)
        self._feed: Feed | None = None
        self._writer: MetricsWriter | None = None
        self._reporter: Reporter | None = None
        session.beat()

    def run(self) -> Outcome:
        """Restores, trains, evaluates, keeps the result, sums up. Whatever it raises: `part` comes next."""
        session, config = self._session, self._config
        state = self._state()
        if self._place.is_rank_zero:
            state.capture().specs()  # what cannot be kept shows now, not at the first snapshot
        checkpointing = self._checkpointing
        restored = checkpointing.restore(state)
        if restored is not None:
            session.resume(restored.counters)
        checkpointing.hold(state, self._shadow, restored)
        session.beat()
        self._advise_before_start()
        self._feed = feed = self._make_feed()
        evaluation = self._evaluation()
        if restored is not None and restored.run_id == self._spec.run_id:
            self._take_up(evaluation)
        if self._place.local_rank == 0:  # on every node: what is known of the run must not be lost with one
            self._writer = self._make_writer()
        timer = DeviceTimer(self._place.device)
        self._reporter = reporter = self._make_reporter(timer)
        loop = Loop(
            session=session,
            task=self._task,
            trainee=self._trainee,
            feed=feed,
            evaluation=evaluation,
            reporter=reporter,
            timer=timer,
            skip_watch=SkipWatch(config.train.max_consecutive_skips),
            snapshotter=checkpointing.begin(state, restored),
            shadow=self._shadow,
        )
        self._log_start()
        complete = loop.run()
        if complete and config.eval.at_end:
            loop.evaluate()
        # Storage that is down may take long; the persister says so, and the session goes on beating.
        session.enter(Phase.SNAPSHOT)
        kept = checkpointing.finish(complete=complete)
        session.enter(Phase.READY)
        outcome = self._outcome(complete, kept, reporter, evaluation)
        if complete and self._place.is_rank_zero and kept.step != session.global_step:
            raise StorageError(
                f"training is complete, but the state of its last step, {session.global_step}, could not be kept",
                "The warnings above say why. Make room, and run it again: it goes on from the newest snapshot.",
            )
        if self._writer is not None and self._place.is_rank_zero:
            self._writer.write([outcome.summary])
        self.close()
        session.enter_exit()
        return outcome

    def part(self, run_dir: Path) -> int | None:
        """After a failure: keeps what can be kept of the last committed step, and what there is to say of the steps up
        to it, which will not be done again.

        Args:
            run_dir: folder of the incarnation.

        Returns:
            the step of the newest snapshot in the memory tier; None if it was not, or need not be, seen to.
        """
        parted = self._checkpointing.part()
        if parted is not None and self._reporter is not None:
            if self._writer is None:
                self._writer = self._make_writer()
            path, incarnation = Path(self._spec.state_dir) / METRICS_FILE, self._spec.incarnation
            written = None
            if self._place.local_rank and has_gone(run_dir, self._place.rank - self._place.local_rank):
                written = partial(last_step_of, path, incarnation)
            with self._shadow.beside():
                self._reporter.report_alone(self._writer, parted.step, run_dir / REPORTED_FILE, written)
        if self._writer is not None:
            self._writer.close()
        return parted.step if parted is not None else None

    def close(self) -> None:
        """Lets go of everything; ends loader processes; writes what is waiting to be written.

        For the end in order: after a failure the process ends, and with it the loader processes; the persister
        finishes by itself.
        """
        if self._feed is not None:
            self._feed.stream.close()
        self._checkpointing.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # ---- parts

    def _checked_limits(self) -> Limits:
        limits = Limits(self._plan, self._config.train.max_steps, self._config.train.max_epochs)
        if self._plan.epoch_tail is EpochTail.DROP and self._plan.length < self._plan.global_batch_size:
            raise DataError(
                f"the dataset has {self._plan.length} samples, fewer than one global batch of "
                f'{self._plan.global_batch_size}, and data.epoch_tail = "drop" leaves them all out',
                'Use data.epoch_tail = "continue" or "partial", or a smaller train.global_batch_size.',
            )
        if self._config.ddp.static_graph and self._place.world_size > 1:
            check_static_graph(self._plan, self._place.world_size)
        return limits

    def _build_trainee(self) -> Trainee:
        config, device = self._config, self._place.device
        self._session.generators.seed(derive(self._session.seed, Stream.MODEL))
        replica = Replica(
            self._task.build_model(), self._place, config.model, config.ddp, reduction=config.elastic.reduction
        )
        precision = Precision(config.train.precision, device, config.scaler, tf32=config.train.tf32)
        optimizer = self._task.build_optimizer(
            replica.module, lambda model: make_optimizer(model, config.optimizer, device)
        )
        updater = Updater(
            optimizer, precision, clip_norm=config.train.clip_norm, check_gradients=config.train.check_gradients
        )
        return Trainee(
            replica=replica,
            optimizer=optimizer,
            updater=updater,
            precision=precision,
            scheduler=self._task.build_scheduler(optimizer, self._limits.num_steps),
            ema=Ema(replica.module, config.model.ema_decay) if config.model.ema_decay is not None else None,
            channels_last=config.model.channels_last,
        )

    def _state(self) -> TrainingState:
        fingerprint = getattr(self._train_data, "fingerprint", None)
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise TaskError(
                f"{self._task.name}.train_data() has a fingerprint of type {type(fingerprint).__name__}",
                "A fingerprint is a string that says what the dataset holds.",
            )
        data = DataIdentity(self._session.seed, self._plan.length, self._config.data.shuffle, fingerprint)
        return TrainingState(self._session, self._task, self._trainee, data, self._batch)

    def _make_feed(self) -> Feed:
        config = self._config.data
        reader = make_reader(
            self._session, self._plan, self._train_data, shuffle=config.shuffle, seed_samples=config.seed_samples
        )
        stream = batches(
            reader,
            self._task.collate,
            my_spans(self._session, self._plan, self._limits),
            num_workers=config.num_workers,
            prefetch_batches=config.prefetch_batches,
            pin_memory=config.pin_memory and self._place.device.type == "cuda",
        )
        if self._task.weight is None and self._place.is_rank_zero:
            stream = inspecting(stream, self._advise)
        return Feed(self._plan, self._limits, stream)

    def _evaluation(self) -> Evaluation:
        config = self._config.eval
        evaluators = [
            Evaluator(
                name,
                dataset,
                self._task,
                place=self._place,
                precision=self._trainee.precision,
                micro_batch_size=config.micro_batch_size or self._batch.micro_batch_size,
                seed=self._session.seed,
                channels_last=self._trainee.channels_last,
                beat=self._session.beat,
            )
            for name, dataset in self._task.build_eval_data().items()
        ]
        return Evaluation(
            evaluators, every_steps=config.every_steps, every_epochs=config.every_epochs, use_ema=config.use_ema
        )

    def _take_up(self, evaluation: Evaluation) -> None:
        """What of the evaluation of the step that the run goes on from is there, and what is missing. Collective."""
        if not evaluation:
            return
        step, stop = self._session.global_step, self._session.sample_position
        path = Path(self._spec.state_dir) / METRICS_FILE
        values = recall_evaluation(path, self._spec.run_id, step, self._place)
        epochs = (self._plan.epochs_done(self._plan.start_of(stop)), self._plan.epochs_done(stop))
        evaluation.take_up(step, values, was_due=step > 0 and evaluation.due(step, *epochs))

    def _make_writer(self) -> MetricsWriter:
        state_dir = Path(self._spec.state_dir)
        has_board = self._config.metrics.tensorboard and self._place.is_rank_zero
        board_dir = state_dir / "tensorboard" if has_board else None
        return MetricsWriter(
            state_dir / METRICS_FILE, board_dir, self._log, after_first=lambda: imports.note(state_dir / IMPORTS_FILE)
        )

    def _make_reporter(self, timer: DeviceTimer) -> Reporter:
        return Reporter(
            self._session,
            timer,
            self._writer,
            self._log,
            every_steps=self._config.metrics.every_steps,
            incarnation=self._spec.incarnation,
            run_id=self._spec.run_id,
            num_workers=self._config.data.num_workers,
            tokens_per_sample=self._task.tokens_per_sample,
            weight_is_tokens=self._task.weight is not None,
            max_steps=self._limits.num_steps,
            advise=self._advise,
        )

    # ---- words

    def _advise_before_start(self) -> None:
        self._advise(
            batchnorm_advice(
                self._trainee.replica.batchnorm_layers(),
                micro_batch_size=self._batch.micro_batch_size,
                world_size=self._place.world_size,
                synchronised=self._config.model.sync_batchnorm,
                can_synchronise=self._place.device.type == "cuda",
            )
        )
        self._advise(
            schedule_advice(
                schedule_horizons(self._trainee.scheduler),
                max_steps=self._limits.num_steps,
                microbatches_per_step=self._batch.num_microbatches,
                world_size=self._place.world_size,
            )
        )

    def _log_start(self) -> None:
        tree = self._trainee.replica.tree
        self._log.info(
            "training_started",
            task=self._config.task,
            world_size=self._place.world_size,
            device=str(self._place.device),
            precision=self._trainee.precision.mode,
            parameters=sum(p.numel() for p in self._trainee.replica.module.parameters()),
            samples=self._plan.length,
            global_batch_size=self._batch.global_batch_size,
            micro_batch_size=self._batch.micro_batch_size,
            max_steps=self._limits.num_steps,
            **(tree.facts(self._batch.num_microbatches) if tree is not None else {}),
            startup_s=round(perf_counter() - self._started_s, 3),
        )

    def _outcome(self, complete: bool, kept: Kept, reporter: Reporter, evaluation: Evaluation) -> Outcome:
        session = self._session
        reason = "complete" if complete else f"preempted ({session.stop_reason})"
        if kept.step is not None and not (complete and kept.durable):
            reason += f", snapshot of step {kept.step} {'durable' if kept.durable else 'in the memory tier only'}"
        elif kept.step is None and self._place.is_rank_zero:
            reason += ", no snapshot could be kept"
        summary = {
            "kind": "summary",
            "step": session.global_step,
            "incarnation": self._spec.incarnation,
            "complete": complete,
            "reason": reason,
            "counters": asdict(session.counters),
            "epochs": session.sample_position / self._plan.length,
            "max_steps": self._limits.num_steps,
            "world_size": self._place.world_size,
            "device": str(self._place.device),
            "precision": self._trainee.precision.mode,
            "last_loss": reporter.last_loss,
            "evaluation": evaluation.last,
            "snapshot": asdict(kept),
            "wall_s": perf_counter() - self._started_s,
            **asdict(reporter.totals),
        }
        return Outcome(complete, reason, summary)
