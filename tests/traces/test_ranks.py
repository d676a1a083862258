"""Ranks as a person writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.door import MOST_RANKS
from foretrace.traces.errors import LayoutError
from foretrace.traces.info import rank_list
from foretrace.traces.layout import ranks_in


@given(st.sets(st.integers(0, 4000), min_size=1))
def test_what_is_written_is_read_back(ranks: set[int]) -> None:
    assert ranks_in(rank_list(ranks)) == tuple(sorted(ranks))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a list of ranks"),
        ("1,,2", "not a list of ranks"),
        ("-1", "not a list of ranks"),
        ("1-", "not a list of ranks"),
        ("0x1", "not a list of ranks"),
        ("0,5-2", "5-2 in '0,5-2' goes down .*: write 2-5"),
        ("0-8", "names rank 8; there are 0 to 7"),
        ("0-99999999999", "names rank 99999999999"),
        ("9" * 5000, "there are 0 to 7"),
    ],
)
def test_what_is_no_list_of_these_ranks_is_told_before_it_is_made(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        ranks_in(text, below=8)


def test_a_world_that_nobody_believes_is_refused() -> None:
    with pytest.raises(LayoutError, match="there are 0 to"):
        ranks_in(f"0-{MOST_RANKS}")
