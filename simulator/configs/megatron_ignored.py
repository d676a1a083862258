"""Arguments of Megatron-LM that do not change how long a step takes, and why; names as in arguments.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from foretrace.simulator.configs import rules
from foretrace.simulator.configs.rules import Leave, Rule

_NUMERIC = Leave("numbers of the model, not its shape")
_ROUTING = Leave("how tokens are routed: --expert-imbalance rules.gives what comes of it")
_FUSED = Leave("fused kernels are what the profile assumes")

IGNORED: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "save-interval": Leave("--checkpoint-every and --checkpoint-bytes-per-s count what it costs"),
        "rampup-batch-size": Leave("the batch at the start: steps are simulated at the full one"),
        "tp-comm-bootstrap-backend": rules.LAUNCH,
        "use-tp-pp-dp-mapping": Leave("--placement says which rank runs where"),
        "num-distributed-optimizer-instances": Leave("--shard-ranks spreads a copy over fewer ranks"),
        "align-grad-reduce": _FUSED,
        **dict.fromkeys(
            (
                *("lr", "min-lr", "lr-decay-style", "lr-decay-iters", "lr-decay-samples", "lr-warmup-iters"),
                *("lr-warmup-samples", "lr-warmup-fraction", "lr-wsd-decay-style", "lr-wsd-decay-iters"),
                *("weight-decay", "adam-beta1", "adam-beta2", "adam-eps", "init-method-std"),
                *("decoupled-lr", "decoupled-min-lr", "seed", "loss-scale", "initial-loss-scale"),
                *("min-loss-scale", "hysteresis", "calculate-per-token-loss", "override-opt_param-scheduler"),
                *("attention-dropout", "main-grads-dtype", "use-precision-aware-optimizer"),
            ),
            rules.LEARNS,
        ),
        **dict.fromkeys(
            (
                *(
                    "log-interval",
                    "log-throughput",
                    "log-memory-to-tensorboard",
                    "tensorboard-dir",
                    "profile",
                ),
                *("profile-step-start", "profile-step-end", "profile-ranks", "use-pytorch-profiler"),
                *("wandb-project", "wandb-exp-name", "wandb-save-dir", "eval-interval", "eval-iters"),
                *(
                    "timing-log-level",
                    "log-timers-to-tensorboard",
                    "log-params-norm",
                    "log-num-zeros-in-grad",
                ),
                "tensorboard-queue-size",
            ),
            rules.LOGS,
        ),
        **dict.fromkeys(
            (
                *("data-path", "data-cache-path", "mock-data", "split", "vocab-file", "merge-file"),
                *(
                    "data-impl",
                    "tokenizer-name-or-path",
                    "valid-num-workers",
                    "tokenizer-model",
                    "tiktoken-pattern",
                    "num-workers",
                    "num-dataset-builder-threads",
                ),
                *("no-create-attention-mask-in-dataloader", "no-mmap-bin-files", "dataloader-type"),
                *("train-data-path", "valid-data-path", "test-data-path", "reset-position-ids"),
                *("reset-attention-mask", "eod-mask-loss"),
            ),
            rules.DATA,
        ),
        **dict.fromkeys(
            (
                *("save", "load", "ckpt-format", "no-load-optim", "no-load-rng", "no-save-optim", "finetune"),
                *("async-save", "dist-ckpt-format", "auto-detect-ckpt-format", "use-dist-ckpt"),
                *("no-initialization", "use-checkpoint-args", "exit-on-missing-checkpoint"),
                "ckpt-fully-parallel-load",
            ),
            rules.WRITES,
        ),
        **dict.fromkeys(
            ("train-iters", "train-samples", "train-tokens", "exit-interval", "exit-duration-in-mins"),
            rules.LENGTH,
        ),
        **dict.fromkeys(
            (
                *("node-rank", "master-addr", "master-port", "rdzv-id", "rdzv-backend", "rdzv-endpoint"),
                *("max-restarts", "distributed-timeout-minutes", "distributed-backend", "local-rank"),
                *(
                    "redirects",
                    "tee",
                    "log-dir",
                    "hostfile",
                    "force-multi",
                    "jobid",
                    "wait",
                    "kill-on-bad-exit",
                ),
                *("use-mcore-models", "transformer-impl", "manual-gc", "manual-gc-interval"),
                *("empty-unused-memory-level", "te-rng-tracker", "no-async-tensor-model-parallel-allreduce"),
                *("use-legacy-models", "spec", "export-te-mcore-model"),
            ),
            rules.LAUNCH,
        ),
        **dict.fromkeys(
            (
                *("rotary-base", "rotary-percent", "rotary-scaling-factor", "use-rope-scaling"),
                *(
                    "rotary-seq-len-interpolation-factor",
                    "norm-epsilon",
                    "apply-layernorm-1p",
                    "squared-relu",
                ),
                *("openai-gelu", "attention-softmax-in-fp32", "apply-query-key-layer-scaling"),
                *("layernorm-epsilon", "fp8-margin", "fp8-amax-history-len", "fp8-amax-compute-algo"),
                *("fp8-interval", "qk-clip", "rope-scaling-factor"),
            ),
            _NUMERIC,
        ),
        **dict.fromkeys(
            (
                *("moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-loss-coeff"),
                *("moe-grouped-gemm", "moe-router-score-function", "moe-router-pre-softmax"),
                *("moe-router-enable-expert-bias", "moe-router-bias-update-rate", "moe-z-loss-coeff"),
                *("moe-permute-fusion", "moe-router-dtype", "moe-router-group-topk", "moe-router-num-groups"),
                *("moe-router-topk-scaling-factor", "moe-token-drop-policy"),
            ),
            _ROUTING,
        ),
        **dict.fromkeys(
            (
                *("no-masked-softmax-fusion", "no-bias-gelu-fusion", "no-bias-swiglu-fusion"),
                *("no-bias-dropout-fusion", "no-rope-fusion", "cross-entropy-loss-fusion"),
                *("cross-entropy-fusion-impl", "bias-swiglu-fusion", "use-fused-weighted-squared-relu"),
                *("no-persist-layer-norm", "fp8-wgrad"),
            ),
            _FUSED,
        ),
    }
)
"""What does not count, by argument."""
