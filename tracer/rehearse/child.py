"""The process that acts out one rank: ``python -m tracer.rehearse.child SPEC.json``.

Prepares torch, runs the script, and writes what it would have done. What it says of progress goes to the file
descriptor of the specification, how it ended to ``outcome.json``; its output is the script's.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracer.rehearse.errors import Finished, RehearsalError
from tracer.rehearse.words import explain, place


def main() -> None:
    """Act out the rank of the specification that is the only argument."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(spec["folder"])
    try:
        outcome = rehearse(spec)
    except RehearsalError as error:
        traceback.print_exc()
        outcome = {"error": str(error)}
    (folder / f"outcome-{spec['rank']:05d}.json").write_text(json.dumps(outcome), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing of a world that was not there needs to be taken down


def rehearse(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run the script of *spec* and write what its rank does; return what is known of the run.

    Raises:
        RehearsalError: the script cannot be rehearsed, or did no step.
    """
    began = time.process_time()
    _environment(spec)
    import torch

    from tracer.rehearse import devices, reducer, sharding, shims
    from tracer.rehearse.session import RehearsalSession
    from tracer.rehearse.streams import Streams
    from tracer.rehearse.watch import Watcher
    from tracer.rehearse.world import World

    torch.set_num_threads(1)
    fake_mode = _fake_mode()  # first of all: it loads the compiler, which wants to see torch as it is

    def tell(words: str) -> None:
        os.write(spec["progress"], f"{words}\n".encode())

    session = RehearsalSession(
        spec["rank"], spec["world_size"], warmup=spec["warmup"], steps=spec["steps"], tell=tell
    )
    world = World(spec["rank"], spec["world_size"])
    world.install()
    reducer.install()
    sharding.install(session)
    devices.install(Streams(session.tape), lambda: (session.memory.total, session.memory.peak))
    kept = shims.install(session)
    session.expect_pipeline(_known_shapes(Path(spec["folder"])))
    watcher = Watcher(session)
    _run(spec, session, (fake_mode, watcher.mode(), devices.device_mode()))
    del kept
    if session.position.step < 0 or not session.tape.n_events:
        raise RehearsalError(
            "the script came to its end without an optimizer step: nothing to rehearse; "
            f"what it printed is in {spec['log']}"
        )
    return _written(spec, session, world) | {"process_s": time.process_time() - began}


def _environment(spec: Mapping[str, Any]) -> None:
    """Set what a launcher sets, and what a script sees of its command line."""
    rank, n_local = spec["rank"], spec["local_world_size"]
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(spec["world_size"]),
            "LOCAL_RANK": str(rank % n_local),
            "LOCAL_WORLD_SIZE": str(n_local),
            "GROUP_RANK": str(rank // n_local),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "rehearsal",
        }
    )
    sys.argv = list(spec["command"])


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def _run(spec: Mapping[str, Any], session: Any, modes: tuple[Any, ...]) -> None:
    """Run the script under *modes* until it ends, or has done the steps that were asked for."""
    from contextlib import ExitStack

    try:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            if spec["stub"]:
                runpy.run_path(spec["stub"], run_name="__stub__")
            if spec["module"]:
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(spec["command"][0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(spec["command"][0]).resolve().parent))
                runpy.run_path(spec["command"][0], run_name="__main__")
            session.is_over = True
            session.steps.finish()
    except Finished:
        pass
    except SystemExit as error:
        if error.code not in {None, 0}:
            raise RehearsalError(
                f"the script ended with {error.code}; its output is in {spec['log']}"
            ) from error
    except RehearsalError as error:
        raise RehearsalError(f"{place(error)}: {error}") from error
    except Exception as error:
        raise RehearsalError(explain(error, spec)) from error


def _known_shapes(folder: Path) -> dict[int, Any]:
    """Return what stages that other ranks hold were found to send."""
    found: dict[int, Any] = {}
    for file in sorted(folder.glob("stages-*.pickle")):
        found |= pickle.loads(file.read_bytes())
    return found


def _written(spec: Mapping[str, Any], session: Any, world: Any) -> dict[str, Any]:
    """Write what the rank does; return what is known of it as JSON."""
    from dataclasses import asdict

    from tracer.process import versions
    from traces.rehearsal import write_rank

    folder, rank = Path(spec["folder"]), spec["rank"]
    write_rank(folder, rank, session.tape.tables())
    shapes = session.shapes
    if shapes is not None and shapes.found:
        (folder / f"stages-{rank:05d}.pickle").write_bytes(pickle.dumps(shapes.found))
    layout, first_step = session.groups.layout(rank), session.first_kept()
    last = max(session.by_step, default=session.position.step)
    return {
        "groups": [asdict(group) for group in world.groups(session)],
        "layout": None if layout is None else layout.degrees,
        "model": session.model,
        "job": {**session.job, "forwards_per_step": session.by_step.get(last, session.forwards)},
        "first_step": first_step,
        "memory": {"peak_bytes": session.memory.peak, "bytes": session.memory.at_peak},
        "stated": [f"{told} ({n} times)" if n > 1 else told for told, n in session.stated.told.items()],
        "notes": session.notes,
        "sent": _shapes(shapes.found if shapes else {}),
        "taken": _shapes(shapes.taken if shapes else {}),
        "versions": versions(),
        "n_events": session.tape.n_events,
        "memory_used_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _shapes(metas: Mapping[int, Any]) -> dict[str, list[Any]]:
    """Return shapes and types of what goes between stages, by stage."""
    return {
        str(stage): [[list(tensor.shape), str(tensor.dtype)] for tensor in meta.forward_metas]
        for stage, meta in metas.items()
    }


if __name__ == "__main__":
    main()
