"""Small spans and descriptions that tests write as runs."""

from foretrace.traces.info import RunInfo


def some(n: int, *, rank: int = 0, first: int = 0) -> dict[str, object]:
    return {
        "rank": [rank] * n,
        "category": ["compute"] * n,
        "kind": [f"kind{(first + i) % 3}" for i in range(n)],
        "start_ns": list(range(first, first + n)),
        "duration_ns": [1] * n,
    }


def info(world_size: int = 1, **values: object) -> RunInfo:
    return RunInfo(origin="recorded", world_size=world_size, **values)  # type: ignore[arg-type]
