"""The order in which rows get a slot."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.pipeline.request import PromptRow, Request
from specgen.pipeline.waiting_queue import WaitingQueue
from specgen.sampling_params import SamplingParams
from specgen.stats import SpeculationStats


def request(index: int, max_tokens: int | None) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(
        row=PromptRow(index, "0" * 16, index + 1, "test", sampling, prompt="x"),
        sample_index=0,
        prompt_token_ids=(1,),
        max_len=100 if max_tokens is None else 1 + max_tokens,
        seed=0,
        num_speculative_tokens=0,
        stop_token_ids=(),
        stats=SpeculationStats(0),
    )


def order_of(queue: WaitingQueue) -> list[int]:
    return [waiting.row.index for waiting in queue]


def test_the_longest_go_first_and_equals_keep_their_order() -> None:
    queue = WaitingQueue()
    queue.add(request(i, n) for i, n in enumerate([5, 9, 5, None, 9, 1, None]))
    assert order_of(queue) == [3, 6, 1, 4, 0, 2, 5]
    queue.add([request(7, 9), request(8, 2)])
    assert order_of(queue) == [3, 6, 1, 4, 7, 0, 2, 8, 5]


def test_a_row_that_gave_way_comes_before_all_others() -> None:
    queue = WaitingQueue()
    queue.add([request(0, 50), request(1, 60)])
    short, shorter = request(2, 3), request(3, 2)
    queue.put_back(short)
    queue.put_back(shorter)
    queue.add([request(4, None)])
    assert order_of(queue) == [3, 2, 4, 1, 0]
    queue.remove(short)
    queue.remove(next(waiting for waiting in queue if waiting.row.index == 1))
    assert order_of(queue) == [3, 4, 0]
    with pytest.raises(ValueError, match="not in"):
        queue.remove(short)
    queue.clear()
    assert (len(queue), order_of(queue)) == (0, [])


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.none() | st.integers(1, 4), max_size=5)),
        st.tuples(st.sampled_from(["pop", "put_back"]), st.just([])),
    )
)


@given(operations)
def test_it_is_the_plain_list_that_is_sorted_each_time(operations: list[tuple[str, list]]) -> None:  # type: ignore[type-arg]
    queue, fresh, returning, taken = WaitingQueue(), [], deque[Request](), []
    index = 0
    for operation, lengths in operations:
        if operation == "add":
            new = [request(index + i, length) for i, length in enumerate(lengths)]
            index += len(new)
            queue.add(new)
            fresh += new
            fresh.sort(key=lambda r: -(r.row.sampling.max_tokens or 10**9))
        elif operation == "pop" and len(queue):
            expected = returning.popleft() if returning else fresh.pop(0)
            assert queue.first is expected
            assert queue.pop() is expected
            taken.append(expected)
        elif operation == "put_back" and taken:
            returning.appendleft(taken[-1])
            queue.put_back(taken.pop())
        assert list(queue) == [*returning, *fresh]
        assert len(queue) == len(returning) + len(fresh)
