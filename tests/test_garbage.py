"""A search looks for garbage rarely, and leaves Python as its user had it."""

from __future__ import annotations

import gc
from threading import Barrier, Thread

import pytest

from mm_autoparallel.garbage import MANY_OBJECTS, collection_is_rare, collection_waits


@pytest.fixture(autouse=True)
def as_it_was():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("before", [(700, 10, 10), (100_000, 5, 5), (0, 10, 10)])
def test_what_was_set_is_set_again(before: tuple[int, int, int]) -> None:
    gc.set_threshold(*before)
    with collection_is_rare():
        with collection_is_rare():
            within = gc.get_threshold()
        assert gc.get_threshold() == within
    assert within == (max(before[0], MANY_OBJECTS) if before[0] else 0, *before[1:])
    assert gc.get_threshold() == before


def test_threads_that_overlap_leave_it_too() -> None:
    before, barrier = gc.get_threshold(), Barrier(2)

    def first() -> None:
        with collection_is_rare():
            barrier.wait()
        barrier.wait()

    thread = Thread(target=first)
    thread.start()
    barrier.wait()
    with collection_is_rare():
        barrier.wait()
        thread.join()
        assert gc.get_threshold()[0] >= MANY_OBJECTS
    assert gc.get_threshold() == before


def test_it_is_put_back_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), collection_is_rare():
        raise KeyError
    with pytest.raises(KeyError), collection_waits():
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.isenabled()
