#!/usr/bin/env bash
# The attention block on two GPUs: every row of docs/block.md, in parts of under ten minutes each.
#
#   experiments/block-2gpu.sh PART [options of experiments.block, such as --results DIR --commit SHA]
#
#   exact     bf16 errors against the unsharded model, and 20 repeats that must give the same bits      (about 2 min)
#   256K      64K and 256K: both kernels, Ulysses, both modes, the bare kernel, profiles                (about 3 min)
#   512K      256K and 512K: slopes, 512K beside Ulysses and the bare kernel, the lowest memory         (about 5 min)
#   widths    U = 2 to 32 at 16K, 64K and 256K, from which experiments.stage_width makes its table      (about 3 min)
#   others    Qwen3-32B's block; one GPU alone; kernel rates from 16K to 1M                             (about 4 min)
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:?name a part: exact, 256K, 512K, widths or others}
shift
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
two() { torchrun --standalone --nproc_per_node 2 -m "$@"; }

case $part in
exact)
    two experiments.parity --kernels fa4 cudnn flash --scopes repeat block --batches 2 "$@"
    ;;
256K)
    two experiments.block --tokens 64K 256K --kernels cudnn fa4 --modes device host --rounds 2 --warmup 1 --profile "$@"
    ;;
512K)
    two experiments.block --tokens 256K 512K --kernels fa4 --modes device host host:overlap=off,dx=bf16 --rounds 1 --warmup 0 "$@"
    two experiments.block --tokens 256K 512K --kernels cudnn --methods ulysses upipe --modes device host --rounds 1 --warmup 0 "$@"
    ;;
widths)
    two experiments.block --tokens 16K 64K 256K --kernels fa4 cudnn --methods upipe \
        --modes device device:U=4 device:U=8 device:U=16 device:U=32 --rounds 2 --warmup 1 "$@"
    ;;
others)
    two experiments.block --model qwen3_32b --tokens 128K 256K --kernels fa4 --modes device host --rounds 1 --warmup 0 "$@"
    python -m experiments.block --tokens 64K 128K --kernels fa4 --modes device device:U=32 --rounds 1 --warmup 0 "$@"
    two experiments.block --kernel-rates --kernels fa4 cudnn flash "$@"
    ;;
*)
    echo "unknown part $part: exact, 256K, 512K, widths or others" >&2
    exit 2
    ;;
esac
