"""What PyTorch's own partitioner keeps of the models of ``saved.py``, without compiling them."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from tests.tracer.saved import built
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table


def kept(name: str, how: str) -> list[tuple[str, Any, int]]:
    """Return operator, shape and bytes of each value that the forward makes and keeps for the backward."""
    found: list[tuple[str, Any, int]] = []

    def partition(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(graph, inputs, **kwargs)
        out = next(node for node in forward.graph.nodes if node.op == "output")
        results = list(out.args[0])
        returned = {_memory(node) for node in results[: kwargs["num_fwd_outputs"]]}
        for node in dict.fromkeys(map(_memory, results[kwargs["num_fwd_outputs"] :])):
            value = getattr(node, "meta", {}).get("val")
            if not isinstance(value, torch.Tensor) or not all(type(n) is int for n in value.shape):
                continue  # of an unknown size are only states of random numbers
            if node.op != "placeholder" and node not in returned:
                found.append((str(node.target), tuple(value.shape), value.numel() * value.element_size()))
        return forward, backward

    def compiled(graph: Any, inputs: Any) -> Any:
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=lambda one, _: one,
            bw_compiler=lambda one, _: one,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )

    model, data = built(name, how)
    casts = torch.autocast("cpu", torch.bfloat16) if how == "autocast" else nullcontext()
    with casts, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        torch.compile(model, backend=compiled)(data.requires_grad_())
    return found


def _memory(node: Any) -> Any:
    """Return what has made the memory of *node*: views have none of their own."""
    while isinstance(node, torch.fx.Node) and isinstance(node.target, torch._ops.OpOverload):
        if not node.target.is_view and node.target is not torch.ops.aten.reshape.default:
            break
        node = node.args[0]
    return node
