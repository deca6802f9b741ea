"""Whether to go on after a failure, and after what pause.

A job that fails now and then goes on for ever; one that leads nowhere is halted. What counts is progress: a failure
after which the job had got further than ever before starts all counts anew. Without progress, three things halt it: a
cause that a restart cannot cure, the same step failing again and again, and too many failures in a window of time.

The pause doubles with every failure without progress, up to a limit, and is shortened by up to half at random, so that
many nodes that failed together do not come back together ("equal jitter": M. Brooker, *Exponential Backoff And
Jitter*, AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastictrain.errors import FINAL_CODES, DataError, HaltError, WorkerFailedError


class CauseKind(StrEnum):
    """What kind of end a worker group came to."""

    HANG = "hang"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out of memory"
    DEVICE_OUT_OF_MEMORY = "device out of memory"
    DEVICE = "device error"
    COLLECTIVE = "collective failed"
    EXCEPTION = "exception"
    MISTAKE = "mistake"
    """The job must be edited."""
    HALT = "halt"
    """A rank itself decided that going on would do harm."""
    EXIT_CODE = "exit code"
    AGENT = "agent"
    SUPERVISOR = "supervisor"
    """The supervisor itself died, and its worker group with it."""
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What is known about the bad end of one rank.

    Args:
        rank: which; None for the agent.
        exit_code: of its process, negative for a signal; None if nobody knows.
        kind: class of the error it reported; "" if it left no report.
        what: what it reported.
        hint: likewise.
        step: the step it was at.
        secondary: another rank failed first.
        killed_as_hung: why we killed it; "" if we did not.
        oom_killed: the kernel killed something for memory meanwhile.
    """

    rank: int | None
    exit_code: int | None
    kind: str = ""
    what: str = ""
    hint: str = ""
    step: int = 0
    secondary: bool = False
    killed_as_hung: str = ""
    oom_killed: bool = False


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a worker group ended, in words.

    Args:
        kind: of the end.
        what: one sentence.
        hint: what to do about it.
        rank: whose fault; None where nobody knows.
        step: the step it was at.
        can_retry: a restart may help.
        exit_code: for a caller who is not to retry.
    """

    kind: CauseKind
    what: str
    hint: str = ""
    rank: int | None = None
    step: int = 0
    can_retry: bool = True
    exit_code: int = WorkerFailedError.exit_code


_TRANSIENT_IO = re.compile(
    r"\b(OSError|IOError|TimeoutError|BlockingIOError|InterruptedError|Connection\w*Error|BrokenPipeError|Errno \d+)\b"
)
_DEVICE_SIGNS: tuple[tuple[str, CauseKind, str], ...] = (
    ("CUDA out of memory", CauseKind.DEVICE_OUT_OF_MEMORY, "the GPU's memory is full"),
    ("OutOfMemoryError", CauseKind.DEVICE_OUT_OF_MEMORY, "the GPU's memory is full"),
    ("CUDA error: out of memory", CauseKind.DEVICE_OUT_OF_MEMORY, "the GPU's memory is full"),
    ("_STATUS_ALLOC_FAILED", CauseKind.DEVICE_OUT_OF_MEMORY, "the GPU's memory is full"),
    ("uncorrectable ECC error", CauseKind.DEVICE, "the GPU's memory is defective (ECC)"),
    ("illegal memory access", CauseKind.DEVICE, "a GPU kernel accessed memory that is not its own"),
    ("device-side assert", CauseKind.DEVICE, "an assertion failed in a GPU kernel, such as an index out of range"),
    ("unspecified launch failure", CauseKind.DEVICE, "a GPU kernel crashed"),
    ("misaligned address", CauseKind.DEVICE, "a GPU kernel accessed memory in a wrong way"),
    ("no kernel image is available", CauseKind.DEVICE, "this build has no kernels for this kind of GPU"),
    ("busy or unavailable", CauseKind.DEVICE, "another process has the GPU to itself, or it is broken"),
    ("no CUDA-capable device", CauseKind.DEVICE, "there is no working GPU"),
    ("fallen off the bus", CauseKind.DEVICE, "the GPU is lost"),
    ("CUDA driver", CauseKind.DEVICE, "the CUDA driver failed"),
    ("NCCL", CauseKind.COLLECTIVE, "a collective failed (NCCL)"),
    ("CUDNN_STATUS", CauseKind.DEVICE, "a cuDNN call failed"),
    ("CUBLAS_STATUS", CauseKind.DEVICE, "a cuBLAS call failed"),
    ("CUDA error", CauseKind.DEVICE, "a CUDA call failed"),
)


def classify(ends: Sequence[RankEnd]) -> Cause:
    """The first cause among the bad ends of a group's ranks, in words.

    A rank that was killed as hung comes first: it is why the others failed. Then what a rank reported by itself, then
    signals and exit codes without a report, then ranks that failed because another did.
    """
    if not ends:
        return Cause(CauseKind.AGENT, "the worker group ended, and nobody knows why")
    first = min(enumerate(ends), key=lambda pair: (_urgency(pair[1]), pair[0]))[1]
    return _describe(first)


def _urgency(end: RankEnd) -> int:
    if end.killed_as_hung:
        return 0
    if end.secondary:
        return 4
    if end.kind:
        return 1
    if end.rank is not None:
        return 3 if end.exit_code == -signal.SIGTERM else 2
    return 5


def _describe(end: RankEnd) -> Cause:
    who = f"rank {end.rank}" if end.rank is not None else "the agent"
    if end.killed_as_hung:
        return Cause(CauseKind.HANG, f"{who} hung: {end.killed_as_hung}", rank=end.rank, step=end.step)
    if end.kind:
        return _describe_report(end, who)
    if end.rank is None and end.what:
        return Cause(CauseKind.AGENT, f"{who} was lost: {end.what}", step=end.step)
    code = end.exit_code
    if code is None:
        return Cause(CauseKind.AGENT, f"{who} ended, and nobody knows how", rank=end.rank, step=end.step)
    if code >= 0:
        kind = CauseKind.EXIT_CODE if end.rank is not None else CauseKind.AGENT
        return Cause(kind, f"{who} ended with exit code {code}, without a report", rank=end.rank, step=end.step)
    if code == -signal.SIGKILL and end.oom_killed:
        return Cause(
            CauseKind.OUT_OF_MEMORY,
            f"{who} was killed (SIGKILL), and the kernel has killed a process for want of memory meanwhile",
            "Give the job more memory, fewer loader workers, or a smaller micro_batch_size.",
            rank=end.rank,
            step=end.step,
        )
    return Cause(CauseKind.SIGNAL, f"{who} was ended by {signal_words(-code)}", rank=end.rank, step=end.step)


def _describe_report(end: RankEnd, who: str) -> Cause:
    what = f"{who}, step {end.step}: {end.what}"
    code = end.exit_code if end.exit_code is not None and end.exit_code > 0 else WorkerFailedError.exit_code
    if end.kind == HaltError.__name__:
        return Cause(CauseKind.HALT, what, end.hint, end.rank, end.step, False, HaltError.exit_code)
    if end.kind == DataError.__name__ and _TRANSIENT_IO.search(end.what):
        return Cause(CauseKind.STORAGE, what, end.hint, end.rank, end.step, True, code)
    if code in FINAL_CODES:
        return Cause(CauseKind.MISTAKE, what, end.hint, end.rank, end.step, False, code)
    if end.secondary:
        return Cause(CauseKind.COLLECTIVE, what, end.hint, end.rank, end.step, True, code)
    for sign, kind, words in _DEVICE_SIGNS:
        if sign in end.what:
            return Cause(kind, f"{what} ({words})", end.hint, end.rank, end.step, True, code)
    return Cause(CauseKind.EXCEPTION, what, end.hint, end.rank, end.step, True, code)


def signal_words(signum: int) -> str:
    """A signal by its name, and what it usually means."""
    meaning = {
        signal.SIGSEGV: "it accessed memory that is not its own",
        signal.SIGABRT: "a library gave up",
        signal.SIGBUS: "memory it had mapped is gone, such as a full /dev/shm",
        signal.SIGFPE: "an arithmetic error",
        signal.SIGILL: "an instruction that this processor does not have",
        signal.SIGKILL: "somebody killed it, or the kernel did",
    }
    try:
        name = signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
    return f"{name} ({meaning[signum]})" if signum in meaning else name  # type: ignore[index]


# ---- the decision


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed life of the worker group.

    Args:
        at_s: when it ended.
        reached_step: the furthest step that was committed.
        began_step: a step was begun, so the cause may lie in the step; else it died before.
        progressed: it had got further than any life before.
        cause: why.
        uncertain_steps: it may have got so many steps further, where nobody was there to see.
    """

    at_s: float
    reached_step: int
    began_step: bool
    progressed: bool
    cause: Cause
    uncertain_steps: int = 0

    def may_be_at_step_of(self, other: Failure) -> bool:
        """Whether both may have failed at the same step."""
        return (
            self.began_step
            and other.began_step
            and self.reached_step <= other.reached_step + other.uncertain_steps
            and other.reached_step <= self.reached_step + self.uncertain_steps
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is borne.

    Args:
        max_failures: failures without progress within the window; one more halts.
        window_s: the window.
        same_step_failures: failures in a row at the same step that halt.
        backoff_s: first pause.
        max_backoff_s: longest pause.
    """

    max_failures: int
    window_s: float
    same_step_failures: int
    backoff_s: float
    max_backoff_s: float


@dataclass(frozen=True, slots=True)
class Restart:
    """Start another worker group.

    Args:
        delay_s: after this pause.
        reason: in words.
    """

    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Give up, keep the state, wait for a person.

    Args:
        reason: the diagnosis.
        hint: what to do.
        exit_code: of a supervisor that does not wait.
    """

    reason: str
    hint: str
    exit_code: int


def since_progress(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """The failures that count: from the last one that had progressed on, it included."""
    counted: list[Failure] = []
    for failure in failures:
        if failure.progressed:
            counted.clear()
        counted.append(failure)
    return tuple(counted)


def decide(
    failures: Sequence[Failure], budget: Budget, *, now_s: float, jitter: float, samples: str = ""
) -> Restart | Halt:
    """What to do after the last of `failures`, oldest first, at least one.

    Args:
        failures: of this job, since it was started or resumed; those of earlier supervisors included (`past`).
        budget: how much is borne.
        now_s: on the clock of `Failure.at_s`.
        jitter: at random from [0, 1): shortens the pause.
        samples: which samples the step holds that failed last, in words; for the diagnosis.
    """
    last = failures[-1]
    cause = last.cause
    if not cause.can_retry:
        return Halt(cause.what, cause.hint, cause.exit_code)
    counted = since_progress(failures)
    if cause.kind is CauseKind.SUPERVISOR and len(counted) == 1:
        # However little is borne: that a machine was switched off once says nothing about the job.
        return Restart(0.0, cause.what)
    in_a_row = 0
    for failure in reversed(counted):
        if not failure.may_be_at_step_of(last):
            break
        in_a_row += 1
    if in_a_row >= budget.same_step_failures:
        holds = f" It holds {samples}." if samples else ""
        return Halt(
            f"{_step_words(last)} fails: {in_a_row} times in a row. The last time: {cause.what}.{holds}",
            cause.hint or "Look at these samples and at the task; then `elastictrain resume`, or start again.",
            HaltError.exit_code,
        )
    recent = [failure for failure in counted if now_s - failure.at_s <= budget.window_s]
    if len(recent) > budget.max_failures:
        return Halt(
            f"{len(recent)} failures without progress in {budget.window_s:.0f} s (supervisor.max_failures = "
            f"{budget.max_failures}), at step {last.reached_step}. The last: {cause.what}",
            cause.hint or "Remove the cause; then `elastictrain resume`, or start again.",
            HaltError.exit_code,
        )
    return Restart(backoff_s(len(counted) - 1, budget, jitter), cause.what)


def decide_elsewhere(count: int, cause: Cause, budget: Budget) -> Halt | None:
    """What to do after worker groups that ended as if another node had failed: go on, unless there were so many of them
    that a node which has failures of its own would have given up by now.

    Not within a window of time: where no rank reaches another, each of them lasts until a limit is over.

    Args:
        count: of them in a row, without progress.
        cause: of the last.
        budget: how much each node bears.
    """
    if count <= budget.max_failures + 1:
        return None
    return Halt(
        f"{count} worker groups in a row ended without progress, each as if another node had failed. The last time: "
        f"{cause.what}",
        "See what the other nodes say. If they say the same, look at the network between them: firewalls, and which "
        "interface GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names; NCCL_DEBUG=INFO says more.",
        HaltError.exit_code,
    )


def _step_words(failure: Failure) -> str:
    first, last = failure.reached_step + 1, failure.reached_step + 1 + failure.uncertain_steps
    return f"step {first}" if first == last else f"one of the steps {first} to {last}"


def backoff_s(num_before: int, budget: Budget, jitter: float) -> float:
    """The pause after a failure that had `num_before` failures without progress before it.

    The first has none: whatever happened is over, and every second counts.
    """
    if num_before == 0:
        return 0.0
    pause_s = min(budget.backoff_s * 2.0 ** min(num_before - 1, 60), budget.max_backoff_s)
    return pause_s * (1 - jitter / 2)
