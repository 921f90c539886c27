"""Whether the rows that may run at a time fit the memory, and how many would."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from specgen.errors import EnvironmentProblem

__all__ = ["check_num_seqs"]


def check_num_seqs(
    max_num_seqs: int,
    *,
    available: int,
    bytes_per_row: int,
    step_bytes: Callable[[int], int],
    cache_bytes: int,
) -> None:
    """Refuse more rows than leave room for a cache.

    Args:
        max_num_seqs: rows that may run at a time.
        available: bytes beside what the device holds already.
        bytes_per_row: of what is kept of a row besides its cache.
        step_bytes: temporaries of the largest step of so many rows.
        cache_bytes: the smallest cache that will do.

    Raises:
        EnvironmentProblem: with the number that would fit.
    """

    def is_too_large(num_seqs: int) -> bool:
        # One row more than there are slots absorbs the writes of padding.
        return (num_seqs + 1) * bytes_per_row + step_bytes(num_seqs) + cache_bytes > available

    if not is_too_large(max_num_seqs):
        return
    fitting = bisect.bisect_left(range(1, max_num_seqs + 1), True, key=is_too_large)
    if fitting == 0:
        return  # not for their number: the cache says what it lacks
    raise EnvironmentProblem(
        f"--max-num-seqs {max_num_seqs}: so many rows leave no room for their cache",
        f"give --max-num-seqs {fitting} or less",
    )
