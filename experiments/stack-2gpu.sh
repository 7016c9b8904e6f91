#!/usr/bin/env bash
# Whole-model steps on one or two GPUs: the tables of docs/layer.md and docs/methods.md, in parts of under ten minutes each.
#
#   experiments/stack-2gpu.sh PART [options of the command, such as --results DIR --commit SHA]
#
#   alst        8 layers of Llama3-8B at 256K beside DeepSpeed's ALST stack                        (4 min, two H200s)
#   whole       all 32 layers at 512K, one step                                                    (7.5 min)
#   qwen        4 layers of Qwen3-32B at 256K beside ALST                                          (2.5 min with --once)
#   offload     8 layers, 64K and 256K: inputs pinned, pageable and not offloaded                  (3.6 min)
#   offload-peers  8 layers, 64K and 256K: the same by transformers and by DeepSpeed                (about 4 min with --once)
#   within      4 layers at 256K: fused layers' working tensors on the device, on pinned and on pageable host memory (not run yet)
#   ladder      Figure 1: 2 layers under 28 GiB, one lever after another                           (about 4.5 min)
#   methods     4 layers at 128K and 256K: every method                                            (about 5 min)
#   methods512K the same at 512K, one timed step each                                              (about 6 min)
#   1M          2 layers at 1M: Ulysses and UPipe (fused layers), one timed step each              (about 5 min)
#   512K        4 layers at 512K: the same                                                         (about 4 min)
#   breakdown   4 layers at 128K: what each part of a step takes, Ulysses and UPipe (fused layers)  (about 2 min)
#   blocks      the same at 512K, attention's forward in the fastest blocks; also the breakdown      (5 min)
#   blocks1M    the same with 2 layers at 1M, without the breakdown                                (7 min)
#   widths      the U ablation: 4 layers at 256K (fused layers, output on the device), U = 2 to 32  (about 2 min)
#   gradients   4 layers at 8K and 64K: gradients of the methods beside the unsharded model      (under 3 min)
#   one         one GPU: 4 layers at 256K, head groups of U = 1 to 8 heads and all heads at once   (about 5 min)
#   one-offload one GPU: 4 layers, 64K and 256K: inputs pinned, pageable and not offloaded           (about 4 min)
#   trl         one GPU: the TRL guide's ladder under 77 GiB                                       (about 3 min)
set -euo pipefail
cd "$(dirname "$0")/.."
parts="alst, whole, qwen, offload, offload-peers, within, ladder, methods, methods512K, 512K, 1M, breakdown, blocks, blocks1M, widths, gradients, one, one-offload or trl"
part=${1:?name a part: $parts}
shift
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
on() { torchrun --standalone --nproc_per_node "$1" -m "${@:2}"; }
every=(ring ulysses upipe:host upipe:device native fpdt)

case $part in
alst)        on 2 experiments.stack --layers 8 --tokens 256K --settings alst upipe:device upipe:host --rounds 1 --warmup 0 "$@" ;;
whole)       on 2 experiments.stack --layers 32 --tokens 512K --kernel fa4 --once --settings upipe:host=20,layer=fused "$@" ;;
qwen)        on 2 experiments.stack --model qwen3_32b --layers 4 --tokens 256K --settings alst upipe:host --rounds 1 --warmup 0 "$@" ;;
offload)     on 2 experiments.stack --layers 8 --tokens 64K 256K --rounds 2 --warmup 1 \
                 --settings upipe:host,offload=none upipe:host,offload=pinned upipe:host,offload=pageable "$@" ;;
offload-peers) on 2 experiments.stack --layers 8 --tokens 64K 256K --rounds 1 --warmup 1 --settings upipe:host,offload=none \
                 upipe:host,offload=pinned upipe:host,offload=transformers upipe:host,offload=deepspeed "$@" ;;
within)      on 2 experiments.stack --layers 4 --tokens 256K --kernel fa4 --rounds 1 --warmup 1 --settings \
                 upipe:device,layer=fused,overlap=off,prefetch=off upipe:device,layer=fused,overlap=off,prefetch=off,within=on \
                 upipe:device,layer=fused,overlap=off,prefetch=off,within=on,offload=pageable "$@" ;;
ladder)      on 2 experiments.ladder --preset figure1 --memory-only "$@" ;;
methods)     on 2 experiments.stack --layers 4 --tokens 128K 256K --profile --rounds 1 --warmup 0 --settings "${every[@]}" "$@" ;;
methods512K) on 2 experiments.stack --layers 4 --tokens 512K --profile --once --short 64K --apart --settings "${every[@]}" "$@" ;;
1M)          on 2 experiments.stack --layers 2 --tokens 1M --once --short 64K --apart \
                 --settings ulysses upipe:host,layer=fused upipe:device,layer=fused "$@" ;;
512K)        on 2 experiments.stack --layers 4 --tokens 512K --once --short 64K --apart \
                 --settings ulysses upipe:host,layer=fused upipe:device,layer=fused "$@" ;;
breakdown)   on 2 experiments.stack --layers 4 --tokens 128K --profile --once --short 64K --apart \
                 --settings ulysses upipe:device,layer=fused,blocks=auto upipe:host,layer=fused,blocks=auto "$@" ;;
blocks)      on 2 experiments.stack --layers 4 --tokens 512K --profile --once --short 64K --apart --settings ulysses:blocks=auto \
                 upipe:device,layer=fused,blocks=auto ulysses upipe:host,layer=fused,blocks=auto "$@" ;;
blocks1M)    on 2 experiments.stack --layers 2 --tokens 1M --once --short 64K --apart --settings ulysses:blocks=auto \
                 upipe:device,layer=fused,blocks=auto ulysses upipe:host,layer=fused,blocks=auto "$@" ;;
widths)      on 2 experiments.stack --layers 4 --tokens 256K --once --short 64K --settings upipe:layer=fused \
                 upipe:U=4,layer=fused upipe:U=8,layer=fused upipe:U=16,layer=fused upipe:U=H,layer=fused "$@" ;;
gradients)   on 2 experiments.gradients --layers 4 --tokens 8K 64K --kernel fa4 --methods ulysses ring upipe:host upipe:device "$@" ;;
one)         on 1 experiments.stack --layers 4 --tokens 256K --kernel fa4 --once --short 64K --settings upipe:layer=fused \
                 upipe:U=4,layer=fused upipe:U=8,layer=fused upipe:U=H,layer=fused upipe upipe:U=H "$@" ;;
one-offload) on 1 experiments.stack --layers 4 --tokens 64K 256K --kernel fa4 --rounds 2 --warmup 0 \
                 --settings upipe:host,offload=none upipe:host,offload=pinned upipe:host,offload=pageable "$@" ;;
trl)         on 1 experiments.ladder --preset trl --memory-only "$@" ;;
*)
    echo "unknown part $part: $parts" >&2
    exit 2
    ;;
esac
