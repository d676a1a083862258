"""Data parallelism: every rank holds the model, gradients are all-reduced in buckets during the backward.

torchrun --nproc-per-node 2 examples/train_ddp.py
"""

from __future__ import annotations

from model import loss_of
from torch.nn.parallel import DistributedDataParallel
from training import batch, build, flags, join, optimizer_of, train


def main() -> None:
    """Train."""
    parser = flags(__doc__)
    parser.add_argument(
        "--bucket-mb", type=float, default=25, help="MiB of gradients that are reduced together"
    )
    args = parser.parse_args()
    world = join()
    model = DistributedDataParallel(build(args, world), bucket_cap_mb=args.bucket_mb)
    optimizer = optimizer_of(model, args)

    def step(number: int) -> float | None:
        tokens, targets = batch(args, world, number, world.rank, args.micro_batch)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.item() if world.rank == 0 else None

    train(args, world, step)


if __name__ == "__main__":
    main()
