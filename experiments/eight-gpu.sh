#!/usr/bin/env bash
# Llama3-8B on eight GPUs of one host, as published: three blocks of commands, each under ten minutes. Not run yet.
# Made for eight H200s with 560 GiB of host memory; torch's allocator is capped at 77 GiB, what an H100-80GB leaves it.
#
#   experiments/eight-gpu.sh BLOCK [options of experiments.stack, such as --results DIR --commit SHA]
#   experiments/eight-gpu.sh BLOCK --show-commands
#
# Seconds of a step as `upipe plan --gpus 8xH200 --host-gib 560` predicts them; imports, weights and kernels take about a minute a
# command more, and for each further method (--apart: one engine at a time).
#   full     1M, all 32 layers, one timed step: upipe with outputs of 12 layers on the host (the inputs alone are 256 GiB) 256;
#            Ulysses 276; upipe device 277
#   methods  all layers: 128K 6 to 7, 256K 20 to 23, every method; 512K 73, upipe and Ulysses
#   long     lowest memory, one step: 2M with 4 layers 108, 3M with 2 120, 5M with 2 328, 7M with 1 322; on four GPUs, 8 layers at
#            512K, 38 each: the U ablation, and 2 Ulysses x 2 ring
set -euo pipefail
cd "$(dirname "$0")/.."
block=${1:?name a block: full, methods or long}
shift
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
show=
[[ ${1:-} == --show-commands ]] && show=echo && shift
more=("$@")
on() { $show torchrun --standalone --nproc_per_node "$1" -m experiments.stack --allocator-cap 77 --kernel fa4 "${@:2}" ${more[@]+"${more[@]}"}; }
once=(--once --short 64K)
lowest=upipe:host,overlap=off,layer=fused,prefetch=off

case $block in
full)
    for setting in upipe:host=12 ulysses upipe:device; do on 8 --layers 32 --tokens 1M "${once[@]}" --settings "$setting"; done
    ;;
methods)
    for tokens in 128K 256K; do
        on 8 --layers 32 --tokens $tokens --rounds 2 --warmup 0 --profile --apart --settings ulysses ring usp:ring=2
        on 8 --layers 32 --tokens $tokens --rounds 2 --warmup 0 --profile --apart --settings fpdt upipe:host upipe:device
    done
    on 8 --layers 32 --tokens 512K "${once[@]}" --apart --settings ulysses upipe:host upipe:device
    ;;
long)
    on 8 --layers 4 --tokens 2M "${once[@]}" --settings "$lowest"
    on 8 --layers 2 --tokens 3M "${once[@]}" --settings "$lowest"
    on 8 --layers 2 --tokens 5M "${once[@]}" --settings "$lowest"
    on 8 --layers 1 --tokens 7M "${once[@]}" --settings "$lowest,keep=0"
    on 4 --layers 8 --tokens 512K "${once[@]}" --settings upipe:U=4 upipe:U=8 upipe:U=16 upipe:U=32
    on 4 --layers 8 --tokens 512K "${once[@]}" --settings ulysses usp:ring=2
    ;;
*)
    echo "unknown block $block: full, methods or long" >&2
    exit 2
    ;;
esac
