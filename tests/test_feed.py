from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rayxfer import TransferError
from rayxfer.feed import Feed

SOON_S = 10.0
"""Far more than anything here takes, also on a busy machine."""


def batch(*names: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros(1)) for name in names]


@pytest.fixture
def run() -> Iterator[Callable[..., Future[Any]]]:
    """Run something in a thread of its own."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def stays_blocked(future: Future[Any]) -> bool:
    time.sleep(0.05)
    return not future.done()


def test_everything_arrives_once_and_in_order(run: Callable[..., Future[Any]]) -> None:
    feed = Feed()
    batches = [batch(*(f"{i}.{j}" for j in range(i % 4))) for i in range(50)]
    assert [] in batches  # an empty one ends nothing

    def produce() -> None:
        for one in batches:
            feed.put(one)
        feed.close()

    producer = run(produce)
    consumer = run(lambda: list(feed))
    found = consumer.result(SOON_S)
    producer.result(SOON_S)
    expected = [item for one in batches for item in one]
    assert len(found) == len(expected) == feed.handed
    for (name, tensor), (wanted, original) in zip(found, expected, strict=True):
        assert name == wanted
        assert tensor is original
    assert feed.last_name == expected[-1][0]


def test_it_is_an_iterator_that_stays_ended() -> None:
    feed = Feed()
    feed.put(batch("a"))
    feed.close()
    assert iter(feed) is feed
    assert [name for name, _ in feed] == ["a"]
    assert list(feed) == []
    with pytest.raises(StopIteration):
        next(feed)
    assert (feed.handed, feed.last_name) == (1, "a")


def test_no_batches_at_all() -> None:
    feed = Feed()
    feed.close()
    assert list(feed) == []
    assert (feed.handed, feed.last_name) == (0, None)


def test_at_most_one_batch_waits_while_one_is_consumed(run: Callable[..., Future[Any]]) -> None:
    feed = Feed()
    feed.put(batch("a", "b"))
    second = run(feed.put, batch("c"))
    assert stays_blocked(second)
    assert next(feed)[0] == "a"  # takes the first batch, so there is room
    second.result(SOON_S)
    third = run(feed.put, batch("d"))
    assert next(feed)[0] == "b"
    assert stays_blocked(third)
    assert next(feed)[0] == "c"
    third.result(SOON_S)


def test_a_consumed_batch_is_let_go() -> None:
    feed = Feed()
    tensor = torch.zeros(1)
    gone = weakref.ref(tensor)
    feed.put([("a", tensor)])
    del tensor
    assert next(feed)[0] == "a"
    feed.put(batch("b"))
    assert next(feed)[0] == "b"
    assert gone() is None


def test_wait_consumed_returns_when_the_next_one_is_asked_for(
    run: Callable[..., Future[Any]],
) -> None:
    feed = Feed()
    feed.put(batch("a", "b"))
    waiting = run(feed.wait_consumed)
    assert stays_blocked(waiting)
    next(feed)
    next(feed)
    assert stays_blocked(waiting)  # "b" is still in use
    asking = run(next, feed)
    waiting.result(SOON_S)
    assert feed.starved
    feed.put(batch("c"))
    assert asking.result(SOON_S)[0] == "c"
    assert not feed.starved


def test_starved_says_who_waits(run: Callable[..., Future[Any]]) -> None:
    feed = Feed()
    asking = run(next, feed)
    eventually(lambda: feed.starved)
    feed.put(batch("a"))
    asking.result(SOON_S)
    assert not feed.starved


def test_abort_releases_a_blocked_consumer(run: Callable[..., Future[Any]]) -> None:
    feed, error = Feed(), TransferError("over")
    asking = run(next, feed)
    eventually(lambda: feed.starved)
    feed.abort(error)
    assert asking.exception(SOON_S) is error


@pytest.mark.parametrize("method", ["put", "wait_consumed"])
def test_abort_releases_a_blocked_producer(run: Callable[..., Future[Any]], method: str) -> None:
    feed, error = Feed(), TransferError("over")
    feed.put(batch("a"))
    blocked = run(feed.put, batch("b")) if method == "put" else run(feed.wait_consumed)
    assert stays_blocked(blocked)
    feed.abort(error)
    assert blocked.exception(SOON_S) is error


def test_after_abort_both_ends_raise_the_first_error() -> None:
    feed, error = Feed(), TransferError("over")
    feed.put(batch("a", "b", "c"))
    next(feed)
    feed.abort(error)
    feed.abort(TransferError("later"))
    for call in (lambda: next(feed), lambda: feed.put(batch("d")), feed.wait_consumed):
        with pytest.raises(TransferError) as caught:
            call()
        assert caught.value is error
    feed.close()
    with pytest.raises(TransferError):
        next(feed)
    assert feed.handed == 1


def test_finish_lets_a_producer_go(run: Callable[..., Future[Any]]) -> None:
    feed = Feed()
    feed.put(batch("a"))
    blocked = [run(feed.put, batch("b")), run(feed.wait_consumed)]
    assert all(stays_blocked(future) for future in blocked)
    feed.finish()
    for future in blocked:
        assert future.result(SOON_S) is None
    feed.put(batch("c"))  # nobody wants it; nobody is held up
    feed.put(batch("d"))
    feed.wait_consumed()


def test_many_threads_abort_at_once(run: Callable[..., Future[Any]]) -> None:
    for _ in range(50):
        feed, error = Feed(), TransferError("over")
        start = threading.Barrier(3)

        def produce(feed: Feed = feed, start: threading.Barrier = start) -> None:
            start.wait()
            while True:
                feed.put(batch("a", "b"))

        def consume(feed: Feed = feed, start: threading.Barrier = start) -> None:
            start.wait()
            for _ in feed:
                pass

        both = [run(produce), run(consume)]
        start.wait()
        feed.abort(error)
        assert [future.exception(SOON_S) for future in both] == [error, error]
