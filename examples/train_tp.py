"""Tensor and sequence parallelism: every matrix is cut over the ranks, and so are the activations between.

torchrun --nproc-per-node 2 examples/train_tp.py
"""

from __future__ import annotations

from model import Llama
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training import build, flags, join, train_model


def parallelize(model: Llama, mesh: DeviceMesh) -> None:
    """Cut *model* over *mesh*: heads and columns per rank, activations between blocks along the sequence."""
    sequence, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
        },
    )
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=sequence),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=sequence),
            },
        )


def main() -> None:
    """Train."""
    args = flags(__doc__).parse_args()
    world = join()
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tp",))
    model = build(args, world)
    parallelize(model, mesh)
    train_model(args, world, model, replica=0)  # the same batch on every rank


if __name__ == "__main__":
    main()
