"""What Inductor, the compiler of ``torch.compile``, makes of the models of ``compiled.py``."""

import warnings
from typing import Any

import torch
from tests.tracer.compiled import built
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V


def counted(model: str, *, by_block: bool = False) -> int:
    """Return the bytes that its fused kernels read and write, forward and backward; nothing is built.

    Args:
        model: name of the model.
        by_block: whether each of the modules in it is compiled for itself.
    """
    found: list[int] = []

    def lowered(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        del kwargs
        compile_fx.record_original_output_strides(graph)
        lowering = GraphLowering(graph, shape_env=shape_env_from_inputs(inputs))
        with (
            V.set_graph_handler(lowering),
            V.set_real_inputs(inputs),
            V.set_debug_handler(DebugContext()),
            V.set_fake_mode(detect_fake_mode(inputs)),
        ):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            nodes = lowering.scheduler.nodes
            fused = [node for node in nodes if not isinstance(node, ExternKernelSchedulerNode)]
            found.extend(node.get_read_write_buffers_sizes() for node in fused)
        return graph.forward

    module, data = built(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own modules use what is deprecated
        torch._dynamo.reset()
        for one in module if by_block else (module,):
            one.compile(
                backend=lambda graph, inputs: compile_fx.compile_fx(graph, inputs, inner_compile=lowered)
            )
        out = module(data)
        (out if out.dim() == 0 else out.sum()).backward()
    return sum(found)
