#!/usr/bin/env bash
# Llama3-8B on eight GPUs of one host, as published: three blocks of commands, each under ten minutes. Not run yet.
# Made for eight H200s with 560 GiB of host memory; torch's allocator is capped at 77 GiB, what an H100-80GB leaves it.
#
#   experiments/eight-gpu.sh BLOCK [options of experiments.stack, such as --results DIR --commit SHA]
#   experiments/eight-gpu.sh BLOCK --show-commands
#
# Predicted seconds, with a minute a command for imports, weights and kernels (steps from `upipe plan` for H200s):
#   full     1M, all 32 layers, one timed step: upipe with outputs of 12 layers on the host (the inputs alone are 256 GiB),
#            Ulysses, upipe device                                                                    (290, 340, 340)
#   methods  all layers at 128K and 256K, every method, two timed steps; 512K, upipe and Ulysses      (420, 540, 330)
#   long     2M with 4 layers, 3M and 5M with 2, 7M with 1, lowest memory, one step; on four GPUs the U ablation at 512K with
#            8 layers, and 2 Ulysses x 2 ring                                                         (210, 210, 380, 360; 400, 240)
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
    on 8 --layers 32 --tokens 128K --rounds 2 --warmup 0 --profile --settings ulysses ring usp:ring=2 fpdt upipe:host upipe:device
    on 8 --layers 32 --tokens 256K --rounds 1 --warmup 0 --profile --settings ulysses ring usp:ring=2 fpdt upipe:host upipe:device
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
