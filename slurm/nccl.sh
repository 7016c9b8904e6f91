# shellcheck shell=bash
# NCCL's settings for every rank, each with its reason; sourced by launch.sh. What is set already stays.

# Warnings say which interface or GPU failed, and cost nothing. INFO prints rings, transports and versions: for a first run on
# a new cluster.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# The UPipe paper's measurements (arXiv 2602.21196) used rings, and trees bring nothing to large messages: its numbers are
# compared with these.
export NCCL_ALGO=${NCCL_ALGO:-RING}

# NVLink SHARP allocates multicast buffers on every GPU for each communicator, and all-to-all, which is most of what is sent
# here, has no use for them: the memory is wanted for tokens.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

# Docker's bridge and loopback have addresses too, but reach no other node. Name your fabric's interface (NCCL_SOCKET_IFNAME=ib0)
# where a node has several.
if ((${SLURM_JOB_NUM_NODES:-1} > 1)) && command -v nvidia-smi >/dev/null; then
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker,virbr}
fi

# At 5M tokens a layer takes a minute and ranks may wait for one that writes to the host: a rank that is gone is found by
# srun --wait, not by a short watchdog.
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=${TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC:-1800}
