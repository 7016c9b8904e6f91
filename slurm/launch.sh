#!/usr/bin/env bash
# What every batch script here runs, on the first node of its job:
#
#   launch.sh train CONFIG.yaml [key=value ...]         one rank a task of the job, `upipe train`
#   launch.sh experiment NAME [options]                 `python -m experiments.run`, a point after the other
#
# SIGUSR1 (of --signal=B:USR1@SECONDS, before the time limit) writes a checkpoint, or gives up the running point, and requeues
# the job, which goes on where it was. SIGTERM does the same without the requeue. From the environment:
#
#   UPIPE_ROOT      the checkout (default: the one this file is in)
#   UPIPE_PYTHON    how Python is started, in words (default: UPIPE_ROOT/.venv/bin/python where it is there, else python3)
#   UPIPE_RUNS      where run folders go, on a file system of all nodes (default: UPIPE_ROOT/runs/slurm)
#   UPIPE_SRUN      more options of srun, in words
set -euo pipefail

main() { # bash reads a function whole before it runs it: a job outlives changes of this file

root=${UPIPE_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
interpreter=$root/.venv/bin/python
[[ -x $interpreter ]] || interpreter=python3
read -ra python <<<"${UPIPE_PYTHON:-$interpreter}"
read -ra srun_options <<<"${UPIPE_SRUN:-}"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} UPIPE_PYTHON="${python[*]}" PYTHONUNBUFFERED=1

die() { echo "launch.sh: error: $*" >&2; exit 2; }

[[ -n ${SLURM_JOB_ID:-} ]] || die "this is no Slurm job; submit one of slurm/*.sbatch with sbatch"
(($# >= 2)) || die "expected: train CONFIG.yaml [key=value ...], or experiment NAME [options]; got: $*"
mode=$1 what=$2
shift 2
attempt=${SLURM_RESTART_COUNT:-0}
run=${UPIPE_RUNS:-$root/runs/slurm}/$SLURM_JOB_NAME-$SLURM_JOB_ID
mkdir -p "$run"
run=$(cd "$run" && pwd) # config.yaml in it names it, and paths of a YAML file are relative to that file

# The environment of every rank.
# shellcheck source=slurm/nccl.sh
source "$root/slurm/nccl.sh"
# MASTER_PORT and the rank of each task come from Slurm's own variables in upipe/launch.py; the address is this node's.
# srun does not take over --cpus-per-task of sbatch since Slurm 22.05: a rank would be left with one core.
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK:-1}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# Fragments take gigabytes at long lengths otherwise.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Many compute nodes have no way out, and no node should ask a hub once a rank: fetch models and data sets beforehand.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} HF_DATASETS_OFFLINE=${HF_DATASETS_OFFLINE:-1}
# Kernels that Triton compiles: ranks of several nodes collide in one cache in a shared home.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$SLURM_JOB_ID}
# Page-locked host memory and RDMA buffers: Slurm passes on the limit of the shell that submitted, which is often 64 KiB.
ulimit -l unlimited 2>/dev/null || echo "launch.sh: warning: locked memory is limited to $(ulimit -l) KiB here (README.md: memlock)" >&2

# The run folder: what ran, with which code, where.
revision=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
if [[ -f $run/revision.txt ]]; then
    began=$(<"$run/revision.txt")
    [[ $began == "$revision" ]] || echo "launch.sh: warning: the code is at $revision now, $run began with $began" >&2
else
    git -C "$root" diff HEAD >"$run/changes.patch" 2>/dev/null || true
    scontrol write batch_script "$SLURM_JOB_ID" "$run/job.sbatch" >/dev/null || true
    cp "$root/slurm/launch.sh" "$root/slurm/nccl.sh" "$run/"
    if [[ $mode == train ]]; then
        # With overrides in it and paths made absolute, so that a requeued job reads what the first attempt read.
        "${python[@]}" -m upipe.cli train "$what" "$@" "train.run_dir=$run/run" --save-config "$run/config.yaml"
    elif [[ $mode == experiment ]]; then
        "${python[@]}" -m experiments.run "$what" --copy-to "$run/experiment"
    fi
    echo "$revision" >"$run/revision.txt"
fi
{
    echo "attempt $attempt, $(date -u +%Y-%m-%dT%H:%M:%SZ), $mode $what $*"
    scontrol show job "$SLURM_JOB_ID"
    nvidia-smi -L 2>/dev/null || echo "no GPU on $(hostname)"
    ulimit -l | sed 's/^/locked memory, KiB: /'
    env | grep -E '^(NCCL|TORCH_NCCL|PYTORCH|OMP|HF|TRITON)_' | sort
} >>"$run/attempts.txt"

case $mode in
    train)
        # A rank that fails leaves the others waiting in a collective; those that end together need time to do so.
        command=(srun --kill-on-bad-exit=0 --wait=60 "${srun_options[@]}" "${python[@]}" -m upipe.cli train "$run/config.yaml")
        command+=(--resume auto)
        progress() { (cd "$run/run/checkpoints" 2>/dev/null && ls -d step_*/DONE 2>/dev/null) || true; }
        ;;
    experiment)
        command=("${python[@]}" -m experiments.run "$what" --resume --results "$run/results" --logs "$run/logs" "$@")
        ((SLURM_JOB_NUM_NODES == 1)) || command+=(--launcher srun)
        progress() { cat "$run"/results/*.jsonl 2>/dev/null || true; }
        ;;
    *) die "$mode: expected train or experiment" ;;
esac
before=$(progress)
told=
echo "launch.sh: attempt $attempt on $SLURM_JOB_NODELIST, in $run: ${command[*]}"
"${command[@]}" &
child=$!
for name in USR1 TERM; do
    # shellcheck disable=SC2064  # the name of now
    trap "told=$name; kill -s $name $child 2>/dev/null || true" "$name"
done
status=0
# A signal ends `wait` before the child has ended.
while wait "$child" && status=0 || status=$?; kill -0 "$child" 2>/dev/null; do :; done

# 75: a checkpoint was written (upipe train); 130: the running point was given up (experiments.run).
if [[ $told == USR1 && ($status == 75 || $status == 130) ]]; then
    if [[ $(progress) == "$before" ]]; then
        echo "launch.sh: error: nothing was finished within the time limit, so the job is not requeued; ask for more --time" >&2
        exit 1
    fi
    echo "launch.sh: told to end by the time limit; requeued"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
echo "launch.sh: ended with status $status, in $run"
exit "$status"

}
main "$@"
