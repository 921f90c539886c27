from __future__ import annotations

from itertools import pairwise

import pytest

from specgen.pipeline.cuda_graphs import batch_buckets


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 15, 16, 17, 64, 100, 256, 1024])
def test_buckets_rise_to_the_largest_batch_with_bounded_padding(max_num_seqs: int) -> None:
    buckets = batch_buckets(max_num_seqs)
    assert buckets[-1] == max_num_seqs
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in pairwise(buckets):
        assert larger <= 2 * smaller
    assert len(buckets) <= 20
