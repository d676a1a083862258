
#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-64}
TP=8
ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # GPUs
    --nnodes $NNODES
)
MODEL=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --position-embedding-type rope --max-position-embeddings 8192
    --untie-embeddings-and-output-weights --disable-bias-linear --hidden-dropout 0.0
    --vocab-size 128256 --make-vocab-size-divisible-by 16
    # --num-experts 8
)
BATCH="--micro-batch-size 1 --global-batch-size $((GPUS_PER_NODE*128)) --seq-length 8192 --bf16"
if [ "$TP" -gt 1 ]; then
    BATCH="$BATCH --sequence-parallel"
fi
if [[ "$TP" == "1" ]]; then
    MODEL+=(--fp8-format hybrid)
else
    MODEL+=(--recompute-activations)
fi
torchrun ${ARGS[@]} pretrain_gpt.py ${MODEL[@]} $BATCH \
    --tensor-model-parallel-size=$TP --pipeline_model_parallel_size 4 \
    --num-layers-per-virtual-pipeline-stage 5 --use-distributed-optimizer --overlap-grad-reduce \
    --lr 1e-4 --not-an-argument 3
