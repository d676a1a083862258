"""Data parallelism: every rank holds the model, gradients are all-reduced in buckets during the backward.

torchrun --nproc-per-node 2 examples/train_ddp.py
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from training import build, flags, join, train_model


def main() -> None:
    """Train."""
    parser = flags(__doc__)
    parser.add_argument(
        "--bucket-mb", type=float, default=25, help="MiB of gradients that are reduced together"
    )
    args = parser.parse_args()
    world = join()
    model = DistributedDataParallel(build(args, world), bucket_cap_mb=args.bucket_mb)
    train_model(args, world, model, replica=world.rank)


if __name__ == "__main__":
    main()
