"""Untied Ulysses (UPipe): sequence-parallel training that walks the attention heads in small groups.

`apply` puts it on a Hugging Face causal LM; see the README for the way through the modules.
"""

import os

import torch

if not torch.accelerator.is_available():
    # Without it DeepSpeed says on standard output, when it is imported, that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from upipe.apply import Handle, UPipeConfig, apply
from upipe.comm import init_distributed
from upipe.preflight import PreflightError

__version__ = "0.1.0"
__all__ = ["Handle", "PreflightError", "UPipeConfig", "apply", "init_distributed"]
