"""Fifth record of KellerJordan/modded-nanogpt (records/2024-10-14_ModernArch): GPT-2, Muon, DDP, compiled.

Rotary embedding, norms of queries and keys, squared ReLU, no biases; 64 sequences of 1024 tokens per rank.
"""

import os

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, LAYERS, VOCABULARY = 768, 6, 12, 50304
BATCH, TOKENS, STEPS, MOMENTUM = 64, 1024, 3, 0.95


@torch.compile  # type: ignore[untyped-decorator]
def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """Return an orthogonal matrix near *gradient*: five steps of a Newton-Schulz iteration in bf16."""
    x = gradient.bfloat16()
    x = x / (x.norm() + 1e-7)
    is_high = x.shape[0] > x.shape[1]
    x = x.T if is_high else x
    for _ in range(5):
        square = x @ x.T
        next_x = square @ x
        x = 3.4445 * x - 4.775 * next_x + 2.0315 * square @ next_x
    return x.T if is_high else x


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is untyped here
    """SGD with momentum whose updates are made orthogonal, on every rank."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter.grad)
                state["moment"].mul_(MOMENTUM).add_(parameter.grad)
                update = orthogonal(parameter.grad.add(state["moment"], alpha=MOMENTUM))
                parameter.add_(update, alpha=-group["lr"] * max(update.shape) ** 0.5)


class Rotary(nn.Module):  # type: ignore[misc]
    """Turns pairs of a head's elements by an angle that grows with the place."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(TOKENS), 1 / 10000 ** (torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos().bfloat16()[None, :, None], persistent=False)
        self.register_buffer("sine", angles.sin().bfloat16()[None, :, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return *x*, ``(batch, TOKENS, HEADS, width)``, turned."""
        first, second = x.chunk(2, 3)
        turned = (first * self.cosine + second * self.sine, second * self.cosine - first * self.sine)
        return torch.cat(turned, 3).type_as(x)


class Block(nn.Module):  # type: ignore[misc]
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.rotary = nn.Linear(WIDTH, WIDTH, bias=False), Rotary()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*."""
        y = functional.rms_norm(x, (WIDTH,))
        q, k, v = (part(y).view(*x.shape[:2], HEADS, -1) for part in self.qkv)
        q, k = (functional.rms_norm(self.rotary(part), (part.shape[-1],)) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).contiguous().view_as(x))
        y = functional.rms_norm(x, (WIDTH,))
        return x + self.down(functional.relu(self.up(y)).square())


class Gpt2(nn.Module):  # type: ignore[misc]
    """The model with its loss over fp32 logits; input and output share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight, self.blocks = self.head.weight, nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = functional.rms_norm(self.blocks(self.tokens(tokens)), (WIDTH,))
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def main() -> None:
    """Train for a few steps."""
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    module = Gpt2().cuda()
    model = DistributedDataParallel(torch.compile(module), device_ids=[int(os.environ["LOCAL_RANK"])])
    head = torch.optim.AdamW(module.head.parameters(), lr=0.0036, betas=(0.9, 0.95), fused=True)
    optimizers = [head, Muon(module.blocks.parameters(), {"lr": 0.00036})]
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
