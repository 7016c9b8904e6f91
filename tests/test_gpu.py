"""On GPUs: bf16 within 1.2 of the plain bf16 model's own error tensor by tensor, fp32 exact. Two GPUs where there are."""

import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def parity(tmp_path, *options):
    processes = min(2, torch.cuda.device_count())
    is_checkout = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True).returncode == 0
    options = (*options, *(() if is_checkout else ("--commit", "untracked")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "experiments.parity",
         "--results", str(tmp_path), *options], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "fa4"])
def test_bf16(tmp_path, kernel):
    if kernel == "fa4":
        pytest.importorskip("flash_attn.cute")
    parity(tmp_path, "--kernels", kernel, "--batches", "2")


def test_fp32(tmp_path):
    parity(tmp_path, "--kernels", "reference", "--dtype", "float32", "--tokens", "2048", "--batches", "1")
