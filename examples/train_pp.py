"""Pipeline parallelism: each rank holds some of the layers, micro-batches flow through all ranks.

torchrun --nproc-per-node 2 examples/train_pp.py --schedule 1f1b
"""

from __future__ import annotations

import argparse

import torch
from model import Config, Llama, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from training import World, batch, build, flags, join, optimizer_of, train

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def stage_layers(n_layers: int, stage: int, n_stages: int) -> range:
    """Return the layers of *stage*: as even as can be, the first stages take what is over."""
    share, over = divmod(n_layers, n_stages)
    start = stage * share + min(stage, over)
    return range(start, start + share + (stage < over))


def build_stage(args: argparse.Namespace, world: World) -> Llama:
    """Return the part of the model that this rank holds, with the weights that the whole model would have."""
    whole = build(args, world)
    first, last = world.rank == 0, world.rank == world.size - 1
    config = Config.read(args.config)
    part = Llama(
        config, stage_layers(config.num_hidden_layers, world.rank, world.size), first=first, last=last
    )
    part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
    part.to(world.device)
    return part


def main() -> None:
    """Train."""
    parser = flags(__doc__)
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b", help="pipeline schedule")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches per step")
    parser.set_defaults(micro_batch=1)
    args = parser.parse_args()
    world = join()
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("pp",))
    model = build_stage(args, world)
    stage = PipelineStage(model, world.rank, world.size, world.device, group=mesh.get_group("pp"))
    schedule = SCHEDULES[args.schedule](stage, args.microbatches, loss_fn=loss_of)
    optimizer = optimizer_of(model, args)

    def step(number: int) -> float | None:
        tokens, targets = batch(args, world, number, 0, args.micro_batch * args.microbatches)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = [tokens] if world.rank == 0 else []
        is_last = world.rank == world.size - 1
        schedule.step(*inputs, target=targets if is_last else None, losses=losses if is_last else None)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    train(args, world, step)


if __name__ == "__main__":
    main()
