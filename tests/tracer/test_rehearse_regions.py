"""What a kernel reads of views of one memory: the bytes that a count of all elements finds."""

import pytest

from foretrace.tracer.rehearse.tape.fused import Reading, region_of

torch = pytest.importorskip("torch")

VIEWS = {
    "all": lambda x: x,
    "turned": lambda x: x.transpose(0, 1),
    "first third": lambda x: x[..., :12],
    "second third": lambda x: x[..., 12:24],
    "half of the heads of the first third": lambda x: x[..., :12].unflatten(-1, (3, 4))[..., :2],
    "other half": lambda x: x[..., :12].unflatten(-1, (3, 4))[..., 2:],
    "one row for all": lambda x: x[:, :1].expand(-1, 5, -1),
    "last rows": lambda x: x[1:],
}


def _elements(view: object) -> set[int]:
    """Return the numbers of the elements in memory that a view of what ``arange`` makes has."""
    return set(torch.as_tensor(view).flatten().tolist())


@pytest.mark.parametrize("second", VIEWS)
@pytest.mark.parametrize("first", VIEWS)
def test_views_that_lie_in_each_other_or_apart_are_read_once(first: str, second: str) -> None:
    """Those that overlap in part count for all of both, but for no more than there is."""
    memory = torch.arange(2 * 5 * 36).reshape(2, 5, 36)
    views = [VIEWS[name](memory) for name in (first, second)]
    one, other = map(_elements, views)
    reading = Reading()
    found = sum(reading.add({region_of(view, 0)}) for view in views) // memory.element_size()
    if one <= other or other <= one or not one & other:
        assert found == len(one | other)
    else:
        assert len(one | other) <= found <= min(len(one) + len(other), memory.numel())
