"""Eager forms as ``simulate`` counts them, against the operators that autograd issues for their code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from foretrace.simulator.compute.fusion import AUTOCAST, EAGER, Both, Passes
from foretrace.simulator.workload.ops import DTYPE_BYTES
from foretrace.tracer.rehearse.tape.calls import tensors_in
from foretrace.tracer.rehearse.tape.pricing import is_elementwise, unordered

torch = pytest.importorskip("torch")
BATCH, TOKENS, HEADS, WIDTH = 2, 64, 8, 32
N = BATCH * TOKENS * HEADS * WIDTH
BF16, FP32 = torch.bfloat16, torch.float32
Form = tuple[Callable[[], Any], Sequence[Any]]
Traffic = tuple[float, list[tuple[float, float]]]
NO_KERNELS = ("aten.empty_like", "aten.new_empty_strided", "aten._unsafe_view", "aten.detach")


def _made(*shape: int, dtype: Any = BF16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def _issued(work: Callable[[], Any]) -> tuple[Any, Traffic]:
    """Return what *work* returns, bytes per element of its kernels, and share and bytes of those apart."""
    mode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
    sizes: list[float] = []
    apart: list[tuple[float, float]] = []

    class Seen(mode):  # type: ignore[misc, valid-type]  # torch is untyped here
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            out, name = func(*args, **(kwargs or {})), str(func.overloadpacket)
            large = [one for one in (*tensors_in(args), *tensors_in(out)) if _elements(one) * 4 >= N]
            if not func.is_view and name not in NO_KERNELS:
                sizes.append(sum(_elements(one) * one.element_size() for one in large) / N)
                if is_elementwise(name, func) and large and (number := unordered(args, out)):
                    apart.append((number / N, sizes[-1]))
            return out

    with Seen():
        made = work()
    return made, _rounded(sum(sizes), apart)


def _elements(tensor: Any) -> int:
    """Return how many elements *tensor* has in memory: what is expanded is there once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return int(torch.Size([size for size, stride in pairs if stride or size == 1]).numel())


def _norm(dtype: Any) -> Form:
    """``LlamaRMSNorm`` of transformers models/llama/modeling_llama.py."""
    hidden, weight = _made(BATCH, TOKENS, HEADS * WIDTH, dtype=dtype), _made(HEADS * WIDTH, dtype=dtype)

    def forward() -> Any:
        wide = hidden.to(FP32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(hidden.dtype)

    return forward, (hidden, weight)


def _turned(x: Any) -> Any:
    return torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)


def _halves(dtype: Any) -> Form:
    """``apply_rotary_pos_emb`` of the same file, of a projection, with angles in *dtype*."""
    projected = _made(BATCH, TOKENS, HEADS * WIDTH)
    cos, sin = (torch.empty(BATCH, 1, TOKENS, WIDTH, dtype=dtype, device="meta") for _ in range(2))

    def forward() -> Any:
        x = projected.view(BATCH, TOKENS, HEADS, WIDTH).transpose(1, 2)
        return (x * cos + _turned(x) * sin).to(BF16)

    return forward, (projected,)


def _complex() -> Form:
    """``apply_rotary_emb`` of meta-llama/llama model.py."""
    x = _made(BATCH, TOKENS, HEADS, WIDTH)
    angles = torch.empty(1, TOKENS, 1, WIDTH // 2, dtype=torch.complex64, device="meta")

    def forward() -> Any:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles).flatten(3).type_as(x)

    return forward, (x,)


def _scaled() -> Form:
    """``_apply_rotary_pos_emb_bshd`` of Megatron-LM rope_utils.py, heads turned whole."""
    x = _made(TOKENS, BATCH, HEADS, WIDTH)
    cos, sin = (torch.empty(TOKENS, 1, 1, WIDTH, dtype=BF16, device="meta") for _ in range(2))

    def forward() -> Any:
        turned, rest = x[..., :WIDTH], x[..., WIDTH:]
        first, second = torch.chunk(turned, 2, -1)
        other = torch.cat((-second, first), -1)
        return torch.cat((turned * cos + other * sin, rest), -1)

    return forward, (x,)


def _joined() -> Form:
    """``GLUActivation`` of nanotron models/llama.py."""
    both = _made(TOKENS, BATCH, 2 * HEADS * WIDTH)

    def forward() -> Any:
        gate, up = torch.split(both, HEADS * WIDTH, -1)
        return torch.nn.functional.silu(gate) * up

    return forward, (both,)


def _clamp() -> Form:
    """Clamps of ``weighted_bias_quick_geglu_impl`` of Megatron-LM fused_bias_geglu.py."""
    both = _made(TOKENS, BATCH, 2 * HEADS * WIDTH)

    def forward() -> Any:
        gate, up = both.chunk(2, -1)
        return torch.cat((gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)), -1)

    return forward, (both,)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (_norm(BF16), EAGER["rmsnorm"]),
        (_norm(FP32), AUTOCAST["rmsnorm"]),
        (_halves(BF16), EAGER["half_rotary"]),
        (_halves(FP32), AUTOCAST["half_rotary"]),
        (_complex(), EAGER["rotary"]),
        (_scaled(), EAGER["scaled_rotary"]),
        (_joined(), EAGER["joined activation"]),
        (_clamp(), EAGER["clamp"]),
    ],
)
def test_traffic_and_addresses_are_those_of_autograd(form: Form, expected: Both) -> None:
    forward, leaves = form
    results, seen = _issued(forward)
    assert _counted(expected.forward) == seen
    gradient = torch.empty_like(results)
    _, seen = _issued(lambda: torch.autograd.grad(results, leaves, gradient))
    assert _counted(expected.backward) == seen


def _counted(passes: Passes) -> Traffic:
    def size(one: Any) -> float:
        return float(one.narrow * DTYPE_BYTES["bf16"] + one.wide * DTYPE_BYTES["fp32"])

    return _rounded(size(passes), [(one.share, size(one)) for one in passes.apart])


def _rounded(total: float, apart: list[tuple[float, float]]) -> Traffic:
    return round(total, 1), sorted((share, round(size, 1)) for share, size in apart)
