"""A script that takes its rank from its launcher is told it, and one that joins another world is refused."""

from pathlib import Path

import pytest

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.tracer.rehearse.world.launchers import environment, inherited, launchers_of, words_of
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

RANKS, PER_NODE = 4, 2

TRAINING = """
import datetime
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train():
    model = torch.nn.Linear(4, 4, device="cuda")
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
"""

BY = {
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
}

JOINING = """
rank, world, local = (int(os.environ[name]) for name in {names})
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29500", rank=rank, world_size=world)
torch.cuda.set_device(local)
assert (torch.cuda.current_device(), torch.cuda.device_count()) == (local, 2)
torch.cuda.set_device(local)
print(rank, world, local, "RANK" in os.environ)
train()
"""


def _rehearsed(
    body: str, folder: Path, loaded: Loaded, *launcher: str, rank: int = 3, n: int = RANKS
) -> tuple[Rehearsal, str]:
    script = folder / "train.py"
    script.write_text(TRAINING + body)
    asked = Asked(command=(*launcher, str(script)), world_size=n, ranks=(rank,), local_world_size=PER_NODE)
    found = rehearse(asked, folder / "run", on=loaded)
    log = rehearsal_folder(folder / "run") / f"rank-{rank:05d}" / "output.log"
    return found, log.read_text()


@pytest.mark.parametrize("launcher", BY)
def test_a_script_is_told_its_rank_by_the_launcher_before_it(
    launcher: str, tmp_path: Path, loaded: Loaded
) -> None:
    """And by no other: where srun starts it, nobody has set RANK."""
    words = (launcher,) if launcher == "torchrun" else (launcher, "-n", "4", "python")
    found, said = _rehearsed(JOINING.format(names=BY[launcher]), tmp_path, loaded, *words)
    assert said.split() == ["3", "4", "1", str(launcher == "torchrun")]
    assert not found.notes


@pytest.mark.parametrize("launcher", BY)
def test_a_rank_that_nobody_tells_is_named_with_its_launcher(
    launcher: str, tmp_path: Path, loaded: Loaded
) -> None:
    body, words = JOINING.format(names=BY[launcher]), () if launcher != "torchrun" else ("srun", "python")
    named = "mpirun" if launcher == "mpiexec" else launcher
    with pytest.raises(
        RehearsalError, match=f"KeyError of '{BY[launcher][0]}', which {named} sets: write it"
    ):
        _rehearsed(body, tmp_path, loaded, *words)


EXPORTED = """
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["WORLD_SIZE"])
per_node = int(os.environ["SLURM_GPUS_ON_NODE"])
assert per_node == torch.cuda.device_count() and int(os.environ["SLURM_CPUS_PER_TASK"]) > 0
dist.init_process_group("nccl", rank=rank, world_size=world)
torch.cuda.set_device(rank - per_node * (rank // per_node))
print(rank, world)
train()
"""


@pytest.mark.parametrize("env", [("env",), ()])
def test_a_script_is_told_what_stands_before_its_launcher(
    env: tuple[str, ...], tmp_path: Path, loaded: Loaded
) -> None:
    """As a file of a batch job exports it; what the launcher sets itself is the launcher's."""
    words = (*env, "WORLD_SIZE=4", "SLURM_PROCID=0", "srun", "python")
    found, said = _rehearsed(EXPORTED, tmp_path, loaded, *words)
    assert said.split() == ["3", "4"]
    assert not found.notes


def test_a_variable_that_no_launcher_sets_is_named_with_where_to_write_it(
    tmp_path: Path, loaded: Loaded
) -> None:
    """Behind srun there is no use in naming torchrun, which starts one task per node, nor srun again."""
    line = "KeyError of 'WORLD_SIZE', which srun does not set: .* -- env WORLD_SIZE=4 srun python train.py"
    with pytest.raises(RehearsalError, match=line):
        _rehearsed(EXPORTED, tmp_path, loaded, "srun", "python")
    body = 'os.environ["SLURM_MEM_PER_NODE"]\n'
    with pytest.raises(RehearsalError, match=r"-- env SLURM_MEM_PER_NODE=\.\.\. srun python train.py"):
        _rehearsed(body, tmp_path, loaded, "srun", "python")


def test_srun_beside_torchrun_starts_a_task_per_node() -> None:
    """Of nodes of two ranks, the last rank is in the second task; alone it is the fourth."""
    spec = {"rank": 3, "world_size": RANKS, "local_world_size": PER_NODE}
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "RANK")
    assert environment({**spec, "launchers": ("srun", "torchrun")})["SLURM_GPUS_ON_NODE"] == str(PER_NODE)

    def told(*command: str) -> list[str | None]:
        found = environment({**spec, "launchers": launchers_of((*command, "train.py"))})
        return [found.get(name) for name in names]

    assert told("srun", "torchrun", "--nproc-per-node", "2") == ["1", "2", "0", "1", "2", "3"]
    assert told("srun", "-m", "cyclic", "python") == ["3", "4", "1", "1", "2", None]
    assert told("srun") == ["3", "4", "1", "1", "2", None]
    assert told() == [None] * 5 + ["3"]


NUMBERED = {
    "torchrun": [
        ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE"),
        ("ROLE_RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    ],
    "srun": [
        (
            *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
            *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NNODES"),
        )
    ],
    "mpirun": [
        (f"{mpi}_RANK", f"{mpi}_LOCAL_RANK", "", f"{mpi}_LOCAL_SIZE", f"{mpi}_SIZE", "")
        for mpi in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    ]
    + [("PMI_RANK", "MPI_LOCALRANKID", "", "MPI_LOCALNRANKS", "PMI_SIZE", "")],
}
"""By launcher: rank, rank on the node, node, ranks of a node, ranks, nodes."""


@pytest.mark.parametrize(("launcher", "names"), [(of, names) for of in NUMBERED for names in NUMBERED[of]])
@pytest.mark.parametrize(("n_nodes", "n_local"), [(1, 1), (1, 4), (3, 2)])
def test_ranks_are_numbered_node_by_node(
    launcher: str, names: tuple[str, ...], n_nodes: int, n_local: int
) -> None:
    n = n_nodes * n_local
    spec = {"world_size": n, "local_world_size": n_local, "launchers": (launcher,)}
    said = [environment({**spec, "rank": rank}) for rank in range(n)]
    expected = [(rank, rank % n_local, rank // n_local, n_local, n, n_nodes) for rank in range(n)]
    told = [[one.get(name) for name in names] for one in said]
    assert told == [
        [str(number) if name else None for name, number in zip(names, numbers, strict=True)]
        for numbers in expected
    ]


THREADS = """
import subprocess
given = os.environ["OMP_NUM_THREADS"]
print(given)
if given == "8":
    of_its_own = {**os.environ, "OMP_NUM_THREADS": "6"}
    sys.exit(subprocess.run(["torchrun", __file__], env=of_its_own).returncode)
dist.init_process_group("nccl")
train()
"""


def test_torchrun_keeps_the_threads_that_it_is_started_with(tmp_path: Path, loaded: Loaded) -> None:
    """What the command line exports, and what a script gives to the torchrun that it starts."""
    assert _rehearsed(THREADS, tmp_path, loaded, "env", "OMP_NUM_THREADS=8", "torchrun")[1].split() == [
        "8",
        "6",
    ]


@pytest.mark.parametrize("flag", ["", "--use-env", "--use_env"])
def test_the_old_launcher_of_torch_tells_a_rank_by_an_argument(flag: str) -> None:
    """The words are those with which torch itself starts a script."""
    launch = pytest.importorskip("torch.distributed.launch")
    run = pytest.importorskip("torch.distributed.run")
    flags = [flag] if flag else []
    given = launch.parse_args([*flags, "--nproc-per-node", "2", "train.py", "--lr", "1"])
    _, _, words = run.config_from_args(given)
    command = ["python", "-m", "torch.distributed.launch", *flags, "train.py", "--lr", "1"]
    spec = {"rank": 3, "world_size": RANKS, "local_world_size": PER_NODE, "launchers": launchers_of(command)}
    own = words_of({**spec, "command": command[-3:]})
    assert own == [word.replace("${local_rank}", "1") for word in words[words.index("train.py") :]]


def test_a_script_is_told_its_rank_by_the_old_launcher(tmp_path: Path, loaded: Loaded) -> None:
    """The last rank of four in nodes of two: as an argument, and in the environment."""
    body = 'dist.init_process_group("nccl")\nprint(*sys.argv[1:], os.environ["LOCAL_RANK"])\ntrain()\n'
    _, said = _rehearsed(body, tmp_path, loaded, "python", "-m", "torch.distributed.launch")
    assert said.split() == ["--local-rank=1", "1"]


@pytest.mark.parametrize(("flags", "told"), [((), ["--local_rank=1"]), (("--no_local_rank",), [])])
def test_a_script_is_told_its_rank_by_the_launcher_of_deepspeed(
    tmp_path: Path, loaded: Loaded, flags: tuple[str, ...], told: list[str]
) -> None:
    """Without the argument a script takes its rank in the world for that on its node."""
    body = 'dist.init_process_group("nccl")\nprint(*sys.argv[1:], os.environ["LOCAL_RANK"])\ntrain()\n'
    _, said = _rehearsed(body, tmp_path, loaded, "deepspeed", "--num_gpus", "2", *flags)
    assert said.split() == [*told, "1"]


@pytest.mark.parametrize("launcher", ["fabric", "/opt/venv/bin/fabric"])
def test_a_script_is_told_what_the_launcher_of_fabric_is_told(
    tmp_path: Path, loaded: Loaded, launcher: str
) -> None:
    """Two nodes of two ranks, whatever its flags say: that is the world of the rehearsal."""
    names = (
        *(f"LT_{name}" for name in ("CLI_USED", "ACCELERATOR", "STRATEGY", "DEVICES", "NUM_NODES")),
        "RANK",
    )
    body = f'dist.init_process_group("nccl")\nprint(*(os.environ[name] for name in {names}))\ntrain()\n'
    words = (launcher, "run", "--accelerator=cuda", "--strategy", "ddp", "--devices=8")
    _, said = _rehearsed(body, tmp_path, loaded, *words)
    assert said.split() == ["1", "cuda", "ddp", "2", "2", "3"]


def test_what_the_launcher_of_this_process_has_set_is_not_for_the_ranks() -> None:
    """A rehearsal in a job of SLURM is one task of it, and none of its ranks is."""
    assert inherited(["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "SLURM_CLUSTER_NAME", "PATH"]) == [
        "SLURM_PROCID",
        "OMPI_COMM_WORLD_RANK",
    ]


@pytest.mark.parametrize(
    "joins",
    [
        'dist.init_process_group("nccl", rank=0, world_size=2)',
        'os.environ.update(RANK="0", WORLD_SIZE="2"); dist.init_process_group("nccl")',
        'dist.init_process_group("nccl", init_method="tcp://127.0.0.1:1?rank=0&world_size=2")',
        'dist.init_process_group("nccl", store=dist.TCPStore("127.0.0.1", 1), rank=0, world_size=2)',
    ],
)
def test_a_world_of_another_size_is_refused(joins: str, tmp_path: Path, loaded: Loaded) -> None:
    """However the script says its size: as one group of all ranks it would be another training."""
    with pytest.raises(
        RehearsalError, match=r"a group of 2 ranks is not the world of 4: rehearse with --world-size 2"
    ):
        _rehearsed(f"{joins}\ntrain()", tmp_path, loaded)


def test_another_rank_and_no_world_are_said(tmp_path: Path, loaded: Loaded) -> None:
    joins = 'dist.init_process_group("nccl", rank=int(os.environ.get("SLURM_PROCID", 0)), world_size=4)'
    (tmp_path / "other").mkdir()
    other, _ = _rehearsed(f"{joins}\ntrain()", tmp_path / "other", loaded)
    assert any("takes itself for rank 0 where rank 3 is rehearsed" in note for note in other.notes)
    alone, _ = _rehearsed("train()", tmp_path, loaded)
    assert any("no process group was made: each of the 4 ranks" in note for note in alone.notes)


def test_who_says_no_rank_is_told_so_in_the_words_of_torch(tmp_path: Path, loaded: Loaded) -> None:
    """Where srun starts the script there is no RANK, of which a group by the environment would come."""
    with pytest.raises(RehearsalError, match="environment variable RANK expected, but not set"):
        _rehearsed('dist.init_process_group("nccl")\ntrain()', tmp_path, loaded, "srun", "python")


STORES = {
    "TCPStore": 'store = dist.TCPStore("127.0.0.1", 29500, 4, rank == 0, datetime.timedelta(seconds=9))',
    "FileStore": 'store = dist.FileStore("nowhere/at/all", 4)',
    "of the group": "store = dist.distributed_c10d._get_default_store()",
}


@pytest.mark.parametrize("name", STORES)
def test_a_store_waits_for_nobody(name: str, tmp_path: Path, loaded: Loaded) -> None:
    """All ranks are taken to have come as far as this one, and to have added what it adds."""
    found, said = _rehearsed(
        f"""
rank = int(os.environ["RANK"])
dist.init_process_group("nccl")
{STORES[name]}
store.set(f"host{{rank}}", f"node{{rank}}")
print(store.add("count", 2), store.add("count", 1))
print(store.get("host3").decode(), store.get("host1").decode())
store.wait([f"host{{other}}" for other in range(4)])
store.set("more", "a")
store.append("more", "b")
print(store.get("more").decode(), store.compare_set("flag", "", "up").decode(), store.check(["host0"]))
train()
""",
        tmp_path,
        loaded,
    )
    assert said.split() == ["8", "12", "node3", "node3", "ab", "up", "True"]
    assert any("asks a store what another rank has set: told its own" in told for told in found.stated)


def test_a_key_that_nobody_sets_is_named(tmp_path: Path, loaded: Loaded) -> None:
    body = 'dist.init_process_group("nccl")\ndist.TCPStore("127.0.0.1", 1, 4, False).get("seed")'
    with pytest.raises(RehearsalError, match="waits for the key 'seed' of a store, which no rank has set"):
        _rehearsed(body, tmp_path, loaded)


MISFITS = {
    "dist.all_to_all([x[:1]] * 2, [x[:1]] * 2)": "sends 2 tensors and fills 2 in a group of 4 ranks",
    "dist.all_to_all_single(x[:4].clone(), x)": "sends 8 elements and fills 4: without splits",
}


@pytest.mark.parametrize("call", MISFITS)
def test_what_nccl_would_not_refuse_and_cannot_do_is_refused(
    call: str, tmp_path: Path, loaded: Loaded
) -> None:
    """It would write past the end of what is filled, or wait for what nobody sends."""
    body = f'dist.init_process_group("nccl")\nx = torch.ones(8, device="cuda")\n{call}\ntrain()'
    with pytest.raises(RehearsalError, match=MISFITS[call]):
        _rehearsed(body, tmp_path, loaded)


def test_a_mesh_that_torch_makes_itself_is_none_of_the_host(tmp_path: Path, loaded: Loaded) -> None:
    """FSDP2 without a mesh asks for one of the accelerator."""
    body = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = fully_shard(torch.nn.Linear(4, 4, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
"""
    assert not _rehearsed(body, tmp_path, loaded)[0].notes


def test_a_monitored_barrier_is_one(tmp_path: Path, loaded: Loaded) -> None:
    """As in a recording over gloo."""
    body = """
dist.init_process_group("cpu:gloo,cuda:nccl")
control = dist.new_group(backend="gloo")
model = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    dist.monitored_barrier(control, timeout=datetime.timedelta(seconds=5))
    optimizer.step()
"""
    found, _ = _rehearsed(body, tmp_path, loaded)
    messages = read_rank(rehearsal_folder(tmp_path / "run"), 3).messages.to_pylist()
    assert [row["kind"] for row in messages] == ["barrier"]
    assert not any("barrier" in note for note in found.notes)
