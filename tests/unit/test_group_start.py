"""A process group that is joined beside other work: real groups of one rank, over gloo."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch._dynamo
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastictrain.errors import TaskError
from elastictrain.training.group_start import joining

DEADLINE_S = 60.0


def join() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(autouse=True)
def leave():
    yield
    assert type(c10d._world) is c10d._World
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_body_goes_on_while_the_group_is_joined():
    body_is_done = threading.Event()

    def join_late() -> None:
        assert body_is_done.wait(DEADLINE_S), "the body waits for the group"
        join()

    with joining(join_late) as group:
        assert not group.is_done
        body_is_done.set()
        group.wait()
        assert group.is_done
        assert dist.get_world_size() == 1


@pytest.mark.parametrize("ask", [dist.is_initialized, lambda: dist.get_rank() == 0, lambda: dist.barrier() is None])
def test_whoever_asks_for_the_group_waits_for_it(ask):
    def join_late() -> None:
        time.sleep(0.2)  # so that the question comes first
        join()

    with joining(join_late) as group:
        assert ask() is True
        group.wait()


def test_what_joining_fails_with_comes_out_where_it_is_waited_for():
    def fail() -> None:
        raise dist.DistNetworkError("no peer")

    with pytest.raises(dist.DistNetworkError, match="no peer"), joining(fail) as group:
        group.wait()


def test_what_joining_fails_with_comes_out_also_where_the_task_made_another_error_of_it():
    def fail() -> None:
        raise dist.DistNetworkError("no peer")

    def train_data() -> None:
        try:
            dist.get_rank()
        except Exception as error:
            raise TaskError("train_data() raised DistNetworkError", "") from error

    with pytest.raises(dist.DistNetworkError, match="no peer"), joining(fail):
        train_data()


def test_an_error_of_the_task_comes_out_at_once():
    never, gone = threading.Event(), threading.Event()

    def join_never() -> None:
        never.wait(DEADLINE_S)
        gone.set()

    with pytest.raises(TaskError, match="mine"), joining(join_never) as group:
        raise TaskError("mine", "")
    assert not gone.is_set(), "nobody waited"
    never.set()
    group.wait()


def test_a_rank_that_has_not_imported_dynamo_joins_first(monkeypatch):
    """torch looks into that module while it makes a group: it must not be half there."""
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    threads = []

    def note_thread() -> None:
        threads.append(threading.current_thread())

    with joining(note_thread) as group:
        assert threads == [threading.main_thread()]
        group.wait()


def test_joining_draws_no_random_number_and_imports_nothing():
    """So it can go beside the task, whose weights and samples are made of the numbers that come next."""
    state, modules = torch.get_rng_state(), set(sys.modules)
    with joining(join) as group:
        group.wait()
    assert torch.equal(torch.get_rng_state(), state)
    assert set(sys.modules) == modules
