"""What a rank does, from its start to its end. `training.start` is the entry point, which needs no torch.

Whatever ends a rank is written down before it goes: an outcome by each node's first rank, or an error report by the
rank that failed, which also keeps its state (`training.parting`). The exit code says whether a restart can help.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from elastictrain.config.schema import JobConfig
from elastictrain.errors import ElasticTrainError, WorkerFailedError
from elastictrain.heartbeat import my_heartbeat
from elastictrain.logs import Logger, make_logger
from elastictrain.procs import die_with_parent
from elastictrain.protocol import ENV_RUN_DIR, OUTCOME_FILE, ErrorReport, RunSpec, write_json
from elastictrain.training import start
from elastictrain.training.device import join_group, leave_group, take_place
from elastictrain.training.group_start import joining
from elastictrain.training.injection import make_session
from elastictrain.training.job import Job
from elastictrain.training.session import LeftBehind, Session
from elastictrain.training.task import user_traceback
from elastictrain.training.termination import Termination

_PEER_LOST_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def main() -> int:
    """Runs one rank; returns its exit code."""
    parent_pid = os.getppid()
    die_with_parent(parent_pid)  # there is nothing to keep yet
    _write_whole_lines()
    run_dir = Path(os.environ[ENV_RUN_DIR])
    start.be_watched(run_dir)
    if (heartbeat := my_heartbeat()) is not None:
        heartbeat.beat()  # torch is imported
    code = _Worker(run_dir, parent_pid).run()
    if code:
        # Not sys.exit: destructors of a process group whose peers are blocked would block as well.
        with contextlib.suppress(OSError):  # nobody may be reading any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return 0


class _Worker:
    """One rank's process.

    Args:
        run_dir: folder of the incarnation.
        parent_pid: who started this process.
    """

    def __init__(self, run_dir: Path, parent_pid: int) -> None:
        self._run_dir = run_dir
        self._parent_pid = parent_pid
        self._spec = spec = RunSpec.read(run_dir)
        self._rank = int(os.environ.get("RANK", "0"))
        output = start.LastingOutput(run_dir, int(os.environ.get("LOCAL_RANK", "0")))
        self._log = make_logger(
            output, stamp=self._stamp, rank=self._rank, incarnation=spec.incarnation, attempt=spec.group.attempt
        )
        self._session: Session | None = None
        self._termination: Termination | None = None
        self._job: Job | None = None

    def _stamp(self) -> dict[str, int]:
        return {} if self._session is None else {"step": self._session.global_step}

    def run(self) -> int:
        """Returns the exit code."""
        failure: BaseException | None = None
        try:
            try:
                self._train()
            except BaseException as error:  # noqa: BLE001 - the last resort: say why, whatever it was
                failure = error
                self._end_signals()
            else:
                return 0
        except LeftBehind as late:  # the signal came just after another failure
            failure = failure if failure is not None else late
            self._end_signals()
        assert failure is not None
        return self._leave(failure)

    def _end_signals(self) -> None:
        if self._termination is not None:
            self._termination.end()

    def _train(self) -> None:
        config = JobConfig.model_validate(self._spec.config)
        elastic = config.elastic
        place = take_place(device=elastic.device, num_threads=_num_threads(config))
        join = partial(join_group, place, backend=elastic.backend, timeout_s=elastic.process_group_timeout_s)
        with joining(join) as group:
            self._session = session = make_session(
                self._spec, place, seed=config.seed, group_timeout_s=elastic.process_group_timeout_s
            )
            grace_s = config.supervisor.teardown_timeout_s
            self._termination = Termination(
                session,
                self._run_dir,
                self._parent_pid,
                grace_s,
                lambda: group.is_done,
                others=self._spec.group.others,
            )
            self._termination.begin()
            self._job = Job(self._spec, session, self._log, await_group=group.wait)
            outcome = self._job.run()
            if place.local_rank == 0:  # every node's supervisor wants to know
                write_json(self._run_dir / OUTCOME_FILE, asdict(outcome))
            if place.is_rank_zero:
                self._log.info("training_ended", reason=outcome.reason)
            leave_group()

    def _leave(self, error: BaseException) -> int:
        """Says why, and keeps what can be kept; returns the exit code."""
        report = describe(error, self._rank, self._session.global_step if self._session is not None else 0)
        # At once: if this process is killed while it keeps its state, the cause is known all the same. On a full disk
        # it is known by the log alone.
        with contextlib.suppress(OSError):
            report.write(self._run_dir)
        _log_failure(self._log, report)
        kept_step = self._part()
        if kept_step is not None:
            with contextlib.suppress(OSError):
                replace(report, kept_step=kept_step).write(self._run_dir)
        return report.exit_code

    def _part(self) -> int | None:
        """Keeps the state; what goes wrong here is said, and changes nothing about the end."""
        if self._job is None:
            return None
        try:
            return self._job.part(self._run_dir)
        except BaseException as error:  # noqa: BLE001 - see above
            self._log.warning("farewell_failed", error=f"{type(error).__name__}: {error}")
            return None


def _write_whole_lines() -> None:
    """All ranks write to one pipe: unbuffered, a print of several pieces would mix with the lines of the others."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _num_threads(config: JobConfig) -> int:
    if config.elastic.threads_per_rank is not None:
        return config.elastic.threads_per_rank
    if config.elastic.reduction == "tree":
        return 1  # not a share of the cores: the number must not change with the number of ranks
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def describe(error: BaseException, rank: int, step: int) -> ErrorReport:
    """Turns whatever ended a rank into a report.

    A failed collective is a consequence, not a cause: some other rank has the cause.
    """
    if isinstance(error, ElasticTrainError):
        return ErrorReport(rank, type(error).__name__, error.what, error.hint, error.exit_code, step)
    if isinstance(error, LeftBehind):
        return ErrorReport(rank, WorkerFailedError.__name__, f"left: {error}", "", 70, step, secondary=True)
    text = str(error)
    is_consequence = isinstance(error, dist.DistError) or any(sign in text for sign in _PEER_LOST_SIGNS)
    if is_consequence:
        what = (
            f"a collective failed, since another rank ended or went silent: {text.splitlines()[0] if text else error!r}"
        )
        return ErrorReport(rank, WorkerFailedError.__name__, what, "", 70, step, secondary=True)
    asked_code = error.code if isinstance(error, SystemExit) else None  # a task that called sys.exit
    return ErrorReport(
        rank,
        WorkerFailedError.__name__,
        f"{type(error).__name__}: {error}",
        user_traceback(error),
        asked_code if isinstance(asked_code, int) and asked_code else WorkerFailedError.exit_code,
        step,
        traceback="".join(traceback.format_exception(error)),
    )


def _log_failure(log: Logger, report: ErrorReport) -> None:
    log.error(
        "rank_failed",
        kind=report.kind,
        what=report.what,
        hint=report.hint,
        secondary=report.secondary,
        exit_code=report.exit_code,
    )
