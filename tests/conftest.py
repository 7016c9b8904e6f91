"""Fixtures of the suite: the worlds of ranks, and the environment every test runs in."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if not torch.cuda.is_available():
    # Where there is a GPU, its tests and the processes that they start are DeepSpeed's users too.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from tests.world import Worlds


@pytest.fixture(scope="session")
def worlds():
    """`worlds(n)`: a world of n gloo ranks, started once for the whole run."""
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _retire(worlds):
    """After each test, not within one, whose calls may build on each other."""
    yield
    worlds.retire()
