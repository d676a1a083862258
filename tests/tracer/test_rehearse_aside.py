"""What one thread asks torch aside takes nothing away from the others, whichever of them ends first."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, get_ident
from types import SimpleNamespace
from typing import Any

from foretrace.tracer.rehearse.session import RehearsalSession


def test_threads_that_are_aside_at_once_come_back_each() -> None:
    """Weights are read by several threads: the last to end left all operators after it unwritten."""
    session: Any = SimpleNamespace(asides=[])
    aside: Any = RehearsalSession.aside
    first_in, second_in, first_out = Event(), Event(), Event()

    def first() -> int:
        with aside(session):
            first_in.set()
            assert second_in.wait(10)
        first_out.set()
        return get_ident()

    def second() -> int:
        assert first_in.wait(10)
        with aside(session), aside(session):
            second_in.set()
            assert first_out.wait(10)
            assert set(session.asides) == {get_ident()}
        return get_ident()

    with ThreadPoolExecutor(2) as pool:
        idents = [pool.submit(one) for one in (first, second)]
        assert idents[0].result() != idents[1].result()
    assert session.asides == []
