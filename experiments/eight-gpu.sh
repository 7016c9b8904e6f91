#!/usr/bin/env bash
# Llama3-8B on eight GPUs of one host, as published: three blocks of commands, each command under ten minutes and each block under
# thirty, and a fourth without a GPU. Not run yet.
# Made for eight H200s with 560 GiB of host memory; torch's allocator is capped at 77 GiB, what an H100-80GB leaves it.
#
#   experiments/eight-gpu.sh BLOCK [options of the commands, such as --results DIR --commit SHA]
#   experiments/eight-gpu.sh BLOCK --show-commands
#
# Seconds of a step as `upipe plan --gpus 8xH200 --host-gib 560` predicts them; a command takes about a minute more for imports,
# weights and kernels, and half a minute for each further engine (--apart: one at a time). Minutes of a whole command are estimates.
#   full     1M, all 32 layers, one timed step: upipe with outputs of 12 layers on the host (the inputs alone are 256 GiB) 256 s;
#            Ulysses 276 s; upipe device 277 s: 6 min each. Gradients at 8K and 128K, all layers, beside the unsharded model: 7 min.
#            In all 25 min
#   methods  all layers, three steps: 128K 6 to 7 s a step (two commands of 4 min), 256K 20 to 23 s (two of 6 min), every method; 512K
#            73 s, upipe and Ulysses (5 min); where the time of a step goes: 256K above, and 1M with 4 layers, 35 s a step (4 min).
#            In all 29 min
#   long     lowest memory, one step: 2M with 4 layers 108 s, 3M with 2 120 s, 5M with 2 328 s, 7M with 1 322 s (3, 3, 7 and 7 min);
#            on four GPUs, 8 layers at 512K, 38 s a step: the U ablation, and 2 Ulysses x 2 ring (5 and 4 min). In all 29 min
#   planner  predicted beside measured for every point of the above, on a CPU: --results DIR where their stack.jsonl is
set -euo pipefail
cd "$(dirname "$0")/.."
block=${1:?name a block: full, methods, long or planner}
shift
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
show=
[[ ${1:-} == --show-commands ]] && show="echo" && shift
more=("$@")
run() { $show "$@" ${more[@]+"${more[@]}"}; }
on() { run torchrun --standalone --nproc_per_node "$1" -m experiments.stack --allocator-cap 77 --kernel fa4 "${@:2}"; }
once=(--once --short 64K)
three=(--rounds 2 --warmup 0 --profile --apart)
lowest=upipe:host,overlap=off,layer=fused,prefetch=off

case $block in
full)
    for setting in upipe:host=12 ulysses upipe:device; do on 8 --layers 32 --tokens 1M "${once[@]}" --settings "$setting"; done
    run torchrun --standalone --nproc_per_node 8 -m experiments.gradients --layers 32 --tokens 8K 128K --kernel fa4 \
        --methods ulysses usp:ring=2 upipe:host=12 upipe:device
    ;;
methods)
    for tokens in 128K 256K; do
        on 8 --layers 32 --tokens $tokens "${three[@]}" --settings ulysses ring usp:ring=2
        on 8 --layers 32 --tokens $tokens "${three[@]}" --settings fpdt upipe:host upipe:device
    done
    on 8 --layers 32 --tokens 512K "${once[@]}" --apart --settings ulysses upipe:host
    on 8 --layers 4 --tokens 1M "${once[@]}" --profile --apart --settings ulysses upipe:host upipe:device
    ;;
long)
    on 8 --layers 4 --tokens 2M "${once[@]}" --settings "$lowest"
    on 8 --layers 2 --tokens 3M "${once[@]}" --settings "$lowest"
    on 8 --layers 2 --tokens 5M "${once[@]}" --settings "$lowest"
    on 8 --layers 1 --tokens 7M "${once[@]}" --settings "$lowest,keep=0"
    on 4 --layers 8 --tokens 512K "${once[@]}" --settings upipe:U=4 upipe:U=8 upipe:U=16 upipe:U=32
    on 4 --layers 8 --tokens 512K "${once[@]}" --apart --settings ulysses usp:ring=2 upipe:ring=2
    ;;
planner)
    run python -m experiments.accuracy --stack
    ;;
*)
    echo "unknown block $block: full, methods, long or planner" >&2
    exit 2
    ;;
esac
