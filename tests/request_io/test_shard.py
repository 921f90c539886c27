from __future__ import annotations

import pytest

from specgen.request_io.shard import WHOLE, Shard


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 6, 7, 20])
def test_shards_divide_the_rows(count: int, num_rows: int) -> None:
    shards = [Shard(number + 1, count) for number in range(count)]
    owners = [[s for s in shards if s.owns(index)] for index in range(num_rows)]
    assert all(len(owner) == 1 for owner in owners)
    for shard in shards:
        own = [index for index in range(num_rows) if shard.owns(index)]
        assert shard.num_rows(num_rows) == len(own)
        assert [shard.position(index) for index in own] == list(range(len(own)))
        assert [shard.index(position) for position in range(len(own))] == own


def test_parsing() -> None:
    assert Shard.parse("2/4") == Shard(2, 4)
    assert str(Shard(2, 4)) == "2/4"
    assert Shard.parse("1/1") == WHOLE
    for text in ("0/4", "5/4", "1", "1/0", "a/b", "-1/2", "1/2/3", "1.0/2", ""):
        with pytest.raises(ValueError, match="must be I/N"):
            Shard.parse(text)
