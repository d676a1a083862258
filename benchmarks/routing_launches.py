"""Counts kernels that Megatron-Core calls: ``router_launches``, ``dispatch_launches``, ``latent_launches``.

    python -m pip download --no-deps megatron-core==0.16.1 && python -m zipfile -e megatron_core*.whl core
    PYTHONPATH=core:$PYTHONPATH python benchmarks/routing_launches.py

Needs no GPU: a layer of 64 experts, and latent attention without its core, run on the processor, rank 0 of 8
in a group that sends nothing, and the operators that reach the device are counted. Those that only look at
memory otherwise, or allocate it, have no kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL: Final = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "slice",
        "select",
        "t",
        "transpose",
        "unsqueeze",
        "squeeze",
        "expand",
        "as_strided",
        "alias",
        "detach",
        "split",
        "split_with_sizes",
        "permute",
        "unbind",
        "new_empty",
        "new_empty_strided",
        "empty",
        "empty_like",
        "lift_fresh",
    ]
)
TOKENS: Final = 2048
WIDTH: Final = 2048


class Counting(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found[name] += name not in NO_KERNEL
        return func(*args, **(kwargs or {}))


class Idle:
    """Stands for a stream and for an event."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Idle]:
        return lambda *_, **__: self


def main() -> None:
    """Print both counts, forward and backward."""
    torch.cuda.Stream = torch.cuda.Event = Idle
    torch.cuda.current_stream = torch.cuda.stream = lambda *_: Idle()
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.all_to_all_single = lambda *_, **__: Idle()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    layer, hidden = _layer(), torch.randn(TOKENS, 1, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    _print("router", lambda: layer.router(hidden)[0])
    probabilities, chosen = layer.router(hidden)
    probabilities = probabilities.detach().requires_grad_()

    def dispatched() -> torch.Tensor:
        # token counts are sums of tensors here, of lists on a GPU: 8 ranks, 3 sums
        dispatcher = layer.token_dispatcher
        sent, weights = dispatcher.token_dispatch(
            *dispatcher.dispatch_preprocess(hidden, chosen, probabilities)
        )
        sorted_, _, weights = dispatcher.dispatch_postprocess(sent, weights)
        back = dispatcher.combine_postprocess(
            dispatcher.token_combine(dispatcher.combine_preprocess(sorted_))
        )
        return back.sum() + weights.sum()

    attention = _latent()
    _print("latent attention, products and collectives included", lambda: attention(hidden, None)[0])
    fused = _fused(layer.router)
    _print("router, fused", lambda: fused(hidden)[0])
    _print("dispatcher, with 24 sums of counts each way that are none on a GPU", dispatched)


def _layer() -> Any:
    core: Any = import_module("megatron.core")
    moe_utils: Any = import_module("megatron.core.transformer.moe.moe_utils")
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    config_of = import_module("megatron.core.transformer.transformer_config").TransformerConfig
    build = import_module("megatron.core.transformer.spec_utils").build_module
    moe_utils.te_general_gemm = None
    core.parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    config = config_of(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=16,
        ffn_hidden_size=4 * WIDTH,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
        bf16=True,
        params_dtype=torch.bfloat16,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        num_moe_experts=64,
        moe_router_topk=6,
        moe_ffn_hidden_size=1408,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-3,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    spec = specs.get_gpt_layer_local_spec(num_experts=64, moe_grouped_gemm=False, normalization="RMSNorm")
    return build(spec.submodules.mlp, config=config).to(torch.bfloat16)


class Scores(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """One kernel each way, from logits to numbers of a shape."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return numbers of *shape*."""
        ctx.like = logits
        return torch.zeros(shape)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Return a gradient of the logits."""
        return torch.zeros_like(ctx.like), None


def _fused(router: Any) -> Any:
    """Return *router* on kernels of Transformer Engine: of scores, of those for the balance, of its loss."""
    moe_utils: Any = import_module("megatron.core.transformer.moe.moe_utils")

    def scored(logits: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return Scores.apply(logits, logits.shape), torch.empty(logits.shape, dtype=torch.bool)

    moe_utils.HAVE_TE = True
    moe_utils.fused_topk_with_score_function = scored
    moe_utils.fused_compute_score_for_moe_aux_loss = lambda **given: scored(**given)[::-1]
    moe_utils.fused_moe_aux_loss = lambda probs, **_: Scores.apply(probs, ())
    router.config.moe_router_fusion = True
    return router


class Kernel(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """One kernel each way: its result has the shape of the values, and all three inputs get gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        """Return a result whose heads are joined."""
        ctx.like = inputs
        return torch.empty_like(inputs[2]).flatten(2)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Return a gradient for each input."""
        return tuple(map(torch.empty_like, ctx.like))


class Core(torch.nn.Module):  # type: ignore[misc]
    """Stands for the core of attention."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, *inputs: torch.Tensor, **_: object) -> Any:
        """Return its result."""
        return Kernel.apply(*inputs[:3])


def _latent() -> Any:
    """Return latent attention of 16 heads without low-rank queries, rotated without YaRN."""
    module: Any = import_module("megatron.core.transformer.multi_latent_attention")
    module.TELinear = module.TEColumnParallelLinear = type("Absent", (), {})
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    config_of = import_module("megatron.core.transformer.transformer_config").MLATransformerConfig
    build = import_module("megatron.core.transformer.spec_utils").build_module
    config = config_of(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=16,
        multi_latent_attention=True,
        q_lora_rank=None,
        rope_type="rope",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
    spec.submodules.self_attention.submodules.core_attention = Core
    return build(spec.submodules.self_attention, config=config, layer_number=1).to(torch.bfloat16)


def _print(what: str, run: Callable[[], torch.Tensor]) -> None:
    with Counting() as forward:
        result = run()
    with Counting() as backward:
        result.backward(torch.ones_like(result))
    print(f"{what}: {forward.found.total()} forward, {backward.found.total()} backward")


if __name__ == "__main__":
    main()
