"""Promises over S3: what a store or the way to it does wrong is detected and named, retried or repaired, never believed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
from s3_server import Fault, Gateway, moto, store
from weight_states import State, changed, same, state

from etude.base.errors import WeightSyncError
from etude.weights.publisher import WeightPublisher
from etude.weights.subscriber import WeightSubscriber


def prefix() -> str:
    return uuid.uuid4().hex


def published(port: int, where: str, count: int) -> tuple[WeightPublisher, list[State]]:
    """A publisher with a base at 0 and deltas after it."""
    publisher, states = WeightPublisher(store(port, where), base_every=100), [state(0)]
    publisher.publish(0, states[0])
    for version in range(1, count):
        states.append(changed(states[-1], version, 0.05))
        publisher.publish(version, states[-1])
    return publisher, states


def test_a_chain_lives_in_a_bucket_without_any_conditional_write(s3_gateway: Gateway) -> None:
    where = prefix()
    _, states = published(s3_gateway.port, where, 4)
    subscriber = WeightSubscriber(store(s3_gateway.port, where))
    assert subscriber.latest() == 3
    for version, expected in enumerate(states):
        assert same(subscriber.fetch(version), expected)
        assert same(subscriber.fetch(3, held=(version, expected)), states[3])
    puts = [headers for method, _, headers in s3_gateway.seen if method == "PUT"]
    assert len(puts) >= 8
    assert not any(headers & {"if-match", "if-none-match"} for headers in puts)


def test_a_large_base_goes_up_in_parts_and_comes_back(s3_port: int) -> None:
    where, large = prefix(), {"x": torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))}
    WeightPublisher(store(s3_port, where)).publish(0, large)
    assert same(WeightSubscriber(store(s3_port, where)).fetch(0), large)


@pytest.mark.parametrize("kind", ["unavailable", "cut_request", "lose_reply"])
@pytest.mark.parametrize("part", ["/deltas/", "/manifests/", "/writers/"])
def test_a_write_that_fails_twice_is_tried_again(s3_gateway: Gateway, kind: str, part: str) -> None:
    where = prefix()
    s3_gateway.faults.append(Fault(kind, "PUT", part, times=2))
    _, states = published(s3_gateway.port, where, 2)
    assert s3_gateway.faults[0].times == 0, "the fault happened"
    assert same(WeightSubscriber(store(s3_gateway.port, where)).fetch(1), states[1])


@pytest.mark.parametrize("kind", ["unavailable", "cut_request", "lose_reply"])
@pytest.mark.parametrize("part", ["/deltas/00000002", "/manifests/00000002"])
def test_an_upload_that_never_succeeds_is_named_and_leaves_the_version_before(
    s3_gateway: Gateway, kind: str, part: str
) -> None:
    """lose_reply: the object is there, but the writer cannot know. The chain goes on from the last version it does know."""
    where = prefix()
    publisher, states = published(s3_gateway.port, where, 2)
    s3_gateway.faults.append(Fault(kind, "PUT", part))
    with pytest.raises(WeightSyncError, match=rf"cannot write {part[1:]}"):
        publisher.publish(2, changed(states[1], 2, 0.05))
    subscriber = WeightSubscriber(store(s3_gateway.port, where))
    landed = kind == "lose_reply" and "manifests" in part
    assert subscriber.latest() == (2 if landed else 1)
    s3_gateway.faults.clear()
    newest = changed(states[1], 3, 0.05)
    assert publisher.publish(3, newest).parent == 1
    assert same(subscriber.fetch(3, held=(1, states[1])), newest)
    assert same(subscriber.fetch(3), newest)


@pytest.mark.parametrize("kind", ["unavailable", "cut_reply", "flip"])
def test_a_read_that_fails_once_is_repaired(s3_gateway: Gateway, kind: str) -> None:
    where = prefix()
    _, states = published(s3_gateway.port, where, 3)
    s3_gateway.faults.append(Fault(kind, "GET", "/deltas/00000002", times=1))
    subscriber = WeightSubscriber(store(s3_gateway.port, where))
    assert same(subscriber.fetch(2, held=(1, states[1])), states[2])
    assert s3_gateway.faults[0].times == 0
    assert subscriber.report is not None
    if kind == "flip":
        assert any("00000002" in problem and "read again" in problem for problem in subscriber.report.repaired)


@pytest.mark.parametrize("kind", ["unavailable", "cut_reply", "flip"])
def test_an_object_that_cannot_be_had_is_named_or_gone_round(s3_gateway: Gateway, kind: str) -> None:
    where = prefix()
    publisher, states = published(s3_gateway.port, where, 3)
    s3_gateway.faults.append(Fault(kind, "GET", "/deltas/00000002"))
    subscriber = WeightSubscriber(store(s3_gateway.port, where))
    with pytest.raises(WeightSyncError, match=r"version 2 cannot be rebuilt: .*deltas/00000002"):
        subscriber.fetch(2, held=(1, states[1]))
    publisher.base_every = 1
    states.append(changed(states[2], 3, 0.05))
    publisher.publish(3, states[3])
    assert same(subscriber.fetch(3, held=(1, states[1])), states[3])
    assert subscriber.report is not None
    assert any("deltas/00000002" in problem for problem in subscriber.report.repaired)


def test_a_store_too_slow_for_the_deadline_is_named_in_time(s3_gateway: Gateway) -> None:
    where = prefix()
    _, states = published(s3_gateway.port, where, 2)
    s3_gateway.faults.append(Fault("stall", "GET", "/deltas/", seconds=30.0))
    subscriber = WeightSubscriber(store(s3_gateway.port, where, request_seconds=0.3, retries=1))
    clock = time.monotonic()
    with pytest.raises(WeightSyncError, match="cannot read deltas/00000001"):
        subscriber.fetch(1, held=(0, states[0]))
    assert time.monotonic() - clock < 5.0


def test_a_slow_store_holds_up_the_background_and_not_the_trainer(s3_gateway: Gateway) -> None:
    publisher, states = published(s3_gateway.port, prefix(), 1)
    arrived = threading.Event()
    s3_gateway.waiting = lambda path: arrived.set()
    s3_gateway.faults.append(Fault("stall", "PUT", "/deltas/", times=1, seconds=1.0))
    future = publisher.publish_async(1, changed(states[0], 1, 0.05))
    assert publisher.blocked_seconds < 0.2
    assert arrived.wait(10)
    assert not future.done()
    assert future.result(20).version == 1
    assert publisher.published_seconds > 0.9


def test_a_store_that_vanishes_is_named_by_both_ends() -> None:
    with moto() as port:
        publisher, states = published(port, "run", 1)
    with pytest.raises(WeightSyncError, match="object store s3://bucket/run: cannot list writers"):
        publisher.publish(1, states[0])
    with pytest.raises(WeightSyncError, match="object store s3://bucket/run: cannot list manifests"):
        WeightSubscriber(store(port, "run", retries=0)).fetch(1, held=(0, states[0]))


KILLED = """
import sys, torch
sys.path[:0] = sys.argv[3:]
from s3_server import store
from weight_states import state
from etude.weights.publisher import WeightPublisher
publisher = WeightPublisher(store(int(sys.argv[1]), sys.argv[2], request_seconds=60.0))
publisher.publish(0, state(0))
publisher.publish(1, {**state(0), "b": torch.ones(300)})
"""


def test_a_writer_killed_in_mid_upload_leaves_the_version_before_and_its_successor_goes_on(s3_gateway: Gateway) -> None:
    where, arrived = prefix(), threading.Event()
    s3_gateway.waiting = lambda path: arrived.set()
    s3_gateway.faults.append(Fault("stall", "PUT", "/deltas/00000001", seconds=60.0))
    here = str(Path(__file__).parent)
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(s3_gateway.port), where, here])
    try:
        assert arrived.wait(60)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    s3_gateway.faults.clear()
    subscriber = WeightSubscriber(store(s3_gateway.port, where))
    assert subscriber.latest() == 0
    successor = WeightPublisher(store(s3_gateway.port, where))
    assert successor.epoch == 1
    again = changed(state(0), 1, 0.1)
    successor.publish(1, again)
    assert same(subscriber.fetch(1, held=(0, state(0))), again)
