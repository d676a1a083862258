"""What the first stage does before its layers: the lookup of tokens, and the tower for those of images.

The tower runs as a part of the embedding: gathered with it, on the first stage, in ``job.precision``. Its
layers are cut over tensor-parallel ranks without sequence parallelism, as Megatron-LM has them
(examples/multimodal); patches and projector every rank works on whole. With adapters beside frozen weights
it is frozen, so that it runs forward alone. Norms and activations of the projector are left out.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from foretrace.simulator.job import Job
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.models.model import Linear, Tower
from foretrace.simulator.workload.attention import attention_block
from foretrace.simulator.workload.ends import embedding_block
from foretrace.simulator.workload.linear import linear_ops
from foretrace.simulator.workload.mlp import mlp_block
from foretrace.simulator.workload.ops import DTYPE_BYTES, PHASES, Block, Op, Phase, Piece, memory, phases
from foretrace.simulator.workload.recompute import recompute_phase
from foretrace.traces.layout import Layout


def embedding_blocks(job: Job) -> tuple[Block, ...]:
    """Return what the first stage does before its layers, for one micro-batch on one rank."""
    embedding, tower = embedding_block(job), job.model.tower
    if tower is None:
        return (embedding,)
    if not job.images:
        return (replace(embedding, params=embedding.params + tower.params(job.layout.tp)),)
    inside = tower_job(job)
    layers = [
        replace((mlp_block if KINDS[kind].is_mlp else attention_block)(inside, layer), layer=-1)
        for layer in range(tower.n_layers)
        for kind in tower.kinds(layer)
    ]
    found = (embedding, _patches(inside, tower), *layers, _projector(job, inside, tower))
    return tuple(map(_forward_alone, found)) if job.lora_rank else found


def tower_job(job: Job) -> Job:
    """Return *job* as its tower sees it: a batch of images that are sequences of patches."""
    tower, layout = job.model.tower, job.layout
    assert tower is not None  # noqa: S101 - only asked for where there is one
    # The tower sees neither pipeline nor context parallelism: all other ranks are replicas to it.
    dp = layout.world_size // layout.tp
    micro_batch = job.micro_batch * job.images
    return replace(
        job,
        model=tower,
        images=0,
        image_tokens=0,
        layout=Layout(dp=dp, tp=layout.tp),
        global_batch=dp * micro_batch,
        micro_batch=micro_batch,
        seq_len=tower.patches(job.image_tokens),
        document_len=0,
        sequence_parallel=False,
        schedule="1f1b",
        virtual_stages=None,
        layers_per_stage=(),
        counted_ends="none",
        recompute_layers=0,
        recompute_every=1,
        offload_layers=0,
        outer_every=0,
        shard_ranks=0,
        capacity_factor=0.0,
        expert_imbalance=0.0,
        lora_rank=0,
        quantized_base=False,
        fp8=False,
        recipe="",
    )


def _forward_alone(block: Block) -> Block:
    # The embedding has left its backward out by itself.
    if block.name == "embedding":
        return block
    kept = {name: block.phases[name] if name == "forward" else () for name in PHASES}
    return replace(block, phases=MappingProxyType(kept), adapters=0, matrices=0)


def _patches(inside: Job, tower: Tower) -> Block:
    """The matrix that makes features of patches, whose inputs need no gradient."""
    # A class token and the like are not made from pixels.
    n_tokens = inside.micro_batch * (inside.seq_len - tower.patches_beside)
    matrix = Linear("patches", tower.vocab, tower.hidden, is_whole=True)
    found = linear_ops(inside, "tower.patches", matrix, n_tokens)
    return _block("tower", tower.embedding_params(), [Piece(found.forward, found.weights, (), found.weights)])


def _projector(job: Job, inside: Job, tower: Tower) -> Block:
    """Matrices that tokens go through, and putting these among those of the text."""
    n_tokens = inside.micro_batch * (job.image_tokens or tower.image_tokens)
    pieces = [
        linear_ops(
            inside, "tower.projector", Linear("projector", n_in, n_out, is_whole=True), n_tokens
        ).piece()
        for n_in, n_out in tower.projector
    ]
    put = memory("tower.put", 3 * n_tokens * job.model.hidden * DTYPE_BYTES[job.precision], job.precision)
    pieces.append(Piece((put,), (put,), (put,)))
    again = tuple(op for piece in pieces for op in piece.forward if isinstance(op, Op))
    # What is not at the beginning of the tower is at its end.
    return _block(
        "tower", tower.ends_params - tower.embedding_params(), pieces, recompute_phase(job, again, ())
    )


def _block(name: str, params: int, pieces: list[Piece], again: Phase = ()) -> Block:
    return Block(name=name, layer=-1, params=params, expert_params=0, phases=phases(pieces, again))
