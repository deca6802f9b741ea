"""What a rank does, from its start to its end. `training.start` is the entry point, which needs no torch.

Whatever ends a rank is written down before it goes: an outcome by rank zero, or an error report by the rank that
failed. The exit code says whether a restart can help.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from elastictrain.config.schema import JobConfig
from elastictrain.core.phases import Phase
from elastictrain.errors import ElasticTrainError, WorkerFailedError
from elastictrain.heartbeat import my_heartbeat
from elastictrain.logs import Logger, make_logger
from elastictrain.procs import die_with_parent
from elastictrain.protocol import ENV_RUN_DIR, OUTCOME_FILE, ErrorReport, RunSpec, write_json
from elastictrain.training import start
from elastictrain.training.device import process_group
from elastictrain.training.job import run_job
from elastictrain.training.session import Session
from elastictrain.training.task import user_traceback

_PEER_LOST_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def main() -> int:
    """Runs one rank; returns its exit code."""
    die_with_parent(os.getppid())
    _write_whole_lines()
    run_dir = Path(os.environ[ENV_RUN_DIR])
    start.be_watched(run_dir)
    if (heartbeat := my_heartbeat()) is not None:
        heartbeat.beat()  # torch is imported
    spec = RunSpec.read(run_dir)
    rank = int(os.environ.get("RANK", "0"))
    session: Session | None = None

    def stamp() -> dict[str, int]:
        return {} if session is None else {"step": session.global_step}

    log = make_logger(stamp=stamp, rank=rank, incarnation=spec.incarnation)
    try:
        config = JobConfig.model_validate(spec.config)
        with process_group(
            device=config.elastic.device,
            backend=config.elastic.backend,
            timeout_s=config.elastic.process_group_timeout_s,
            num_threads=_num_threads(config),
        ) as place:
            session = Session(place, seed=config.seed)
            signal.signal(signal.SIGTERM, lambda _signum, _frame: _stop(session, "SIGTERM"))
            outcome = run_job(spec, session, log)
            if place.is_rank_zero:
                write_json(run_dir / OUTCOME_FILE, asdict(outcome))
                log.info("training_ended", reason=outcome.reason)
    except Exception as error:  # noqa: BLE001 - the last resort: say why, whatever it was
        report = describe(error, rank, session.global_step if session is not None else 0)
        report.write(run_dir)
        _log_failure(log, report)
        # Not sys.exit: destructors of a process group whose peers are blocked would block as well.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report.exit_code)
    return 0


def _write_whole_lines() -> None:
    """All ranks write to one pipe: unbuffered, a print of several pieces would mix with the lines of the others."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _stop(session: Session | None, reason: str) -> None:
    if session is not None and session.phase is not Phase.EXIT:
        session.request_stop(reason)


def _num_threads(config: JobConfig) -> int:
    if config.elastic.threads_per_rank is not None:
        return config.elastic.threads_per_rank
    if config.elastic.reduction == "tree":
        return 1  # not a share of the cores: the number must not change with the number of ranks
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def describe(error: Exception, rank: int, step: int) -> ErrorReport:
    """Turns whatever ended a rank into a report.

    A failed collective is a consequence, not a cause: some other rank has the cause.
    """
    if isinstance(error, ElasticTrainError):
        return ErrorReport(rank, type(error).__name__, error.what, error.hint, error.exit_code, step)
    text = str(error)
    is_consequence = isinstance(error, dist.DistError) or any(sign in text for sign in _PEER_LOST_SIGNS)
    if is_consequence:
        what = (
            f"a collective failed, since another rank ended or went silent: {text.splitlines()[0] if text else error!r}"
        )
        return ErrorReport(rank, WorkerFailedError.__name__, what, "", 70, step, secondary=True)
    return ErrorReport(
        rank,
        WorkerFailedError.__name__,
        f"{type(error).__name__}: {error}",
        user_traceback(error),
        WorkerFailedError.exit_code,
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
