"""The suite notices faults: each of these changes to the source must make named tests fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# name -> (module, what stands there, what to put there, tests that must fail)
MUTATIONS = {
    "schedule: a call's kv head is always the stage's first": (
        "schedule.py", "KernelCall(first, count, kv, 1, arrival[kv])", "KernelCall(first, count, q[0] // g, 1, arrival[kv])",
        ["tests/test_schedule.py"]),
    "rotation turns the other way": (
        "rotary.py", "first, second = a * ca - b * sa, b * cb + a * sb", "first, second = a * ca + b * sa, b * cb - a * sb",
        ["tests/test_rotary.py"]),
    "rotation's backward turns forwards": (
        "rotary.py", "first, second = a * ca + b * sb, b * cb - a * sa", "first, second = a * ca - b * sb, b * cb + a * sa",
        ["tests/test_rotary.py"]),
    "kv gradient: the last group of query heads wins": (
        "block.py", "total[:, :, kv - self.heads.start] += share[:, :, i]", "total[:, :, kv - self.heads.start] = share[:, :, i]",
        ["tests/test_block.py"]),
    "kv gradient: the last replica wins": (
        "block.py", "parts[0] if len(parts) == 1 else sum(p.to(run.wide) for p in parts)", "parts[-1]",
        ["tests/test_block.py"]),
    "kv gradient: the last replica wins (bf16)": (
        "block.py", "self.grads[name][run.rows_of(h)] += part.t() @ run.x", "self.grads[name][run.rows_of(h)] = part.t() @ run.x",
        ["tests/test_block.py"]),
    "a returned stage is read before it has arrived": (
        "block.py", "            self.work.wait()\n", "", ["tests/test_block.py"]),
    "a buffer is given back while it is sent": (
        "block.py", "        self.sending = _Heads(self, send, recv, work, mine)\n        return self.sending",
        "        self.space.give(send)\n        return _Heads(self, None, recv, work, mine)", ["tests/test_block.py"]),
    "the recomputed forward takes another call's copy": (
        "block.py", "copy = calls.pop(0)", "copy = calls.pop()", ["tests/test_block.py", "-k", "two_blocks"]),
    "loss: only the first data-parallel group's tokens count": (
        "loader.py", "return sum(team[0][2] for team in teams)", "return teams[0][0][2]",
        ["tests/test_loader.py"]),
    "packed rows: no document ends": (
        "apply.py", "begins = position_ids[:, 1:] != position_ids[:, :-1] + 1", "begins = position_ids[:, 1:] < 0",
        ["tests/test_exactness_grid.py", "-k", "packed and not slow"]),
    "zigzag: the two runs of a rank are swapped": (
        "zigzag.py", "return rank * run, (2 * ring - 1 - rank) * run", "return (2 * ring - 1 - rank) * run, rank * run",
        ["tests/test_methods.py", "-k", "test_methods and ring-2x1"]),
    "ring: a merge is dropped": (
        "ring.py", "                merge_(total[rows, queries], lse[rows, :, queries], part, part_lse)\n", "                pass\n",
        ["tests/test_methods.py", "-k", "test_methods and usp-2x2"]),
    "fpdt: a merge is dropped": (
        "methods/fpdt.py", "merge_(total[rows, queries, a], lse[rows, a, queries], part, part_lse)", "pass",
        ["tests/test_methods.py", "-k", "test_methods and fpdt-1x2"]),
    "fpdt: dq of earlier keys is forgotten": (
        "methods/fpdt.py", "            dq += before.get()", "            before.get()",
        ["tests/test_methods.py", "-k", "test_methods and fpdt-1x2"]),
    "methods: the last copy's kv gradient wins": (
        "methods/core.py", "total.index_add_(2,", "total.index_copy_(2,",
        ["tests/test_methods.py", "-k", "test_methods and usp-1x4"]),
    "window one token too long": (
        "kernels.py", "(keys > rows) | (keys <= rows - window)", "(keys > rows) | (keys < rows - window)",
        ["tests/test_zoo.py", "-k", "T33"]),
    "zigzag: a ring rank's two runs change places": (
        "zigzag.py", "first, second = _runs(run, ring, ring_rank)", "second, first = _runs(run, ring, ring_rank)",
        ["tests/test_hybrid.py", "-k", "hybrid_grid and not sample"]),
    "ring: the first step's result is not merged": (
        "ring.py", "merge_(total[rows, queries], lse", "step > 1 and merge_(total[rows, queries], lse",
        ["tests/test_hybrid.py", "-k", "hybrid_grid and not sample"]),
    "ring: dk and dv of the last step stay where they were made": (
        "ring.py", "        self._collect(returning, sums)\n        for total", "        returning.arrive()\n        for total",
        ["tests/test_hybrid.py", "-k", "hybrid_grid and not sample"]),
    "ring: its neighbours form it": (
        "comm.py", "self._own(mesh.ring_groups, rank)", "self._own(mesh.ulysses_groups, rank)",
        ["tests/test_hybrid.py", "-k", "ring2-ulysses2 and not sample"]),
    "ring: what is gathered stays in the order of the ranks": (
        "comm.py", "if self.ring_size == 1:\n            return whole", "if True:\n            return whole",
        ["tests/test_hybrid.py", "-k", "packed and not sample"]),
    "sinks: their gradient has the wrong sign": (
        "block.py", 'self.result["sinks"][heads] -= (share', 'self.result["sinks"][heads] += (share',
        ["tests/test_zoo.py", "-k", "T34"]),
    "sparse attention: the gate scores are not gathered": (
        "glm/indexer.py", "keys, gates = whole.split(self.head_dim, dim=-1)", "keys = whole[..., : self.head_dim]",
        ["tests/test_glm_context.py", "-k", "two_ranks_equal_one and not deepspeed"]),
    "sparse attention: gate scores of other tokens": (
        "glm/indexer.py", "gathered(torch.cat((keys, gates), dim=-1))", "gathered(torch.cat((keys, gates.flip(1)), dim=-1))",
        ["tests/test_glm_sparse.py", "-k", "selection_equals"]),
    "indexer: places without a pool are not -1": (
        "glm/indexer.py", ".masked_fill(columns < 0, -1)", "", ["tests/test_glm_sparse.py", "-k", "equals"]),
    "sparse attention: -1 is attended to": (
        "glm/sparse.py", "(tokens >= 0)[:, None]", "(tokens >= -1)[:, None]", ["tests/test_glm_sparse.py", "-k", "equals"]),
    "indexer: no bound on what int32 counts": (
        "glm/context.py", "if tokens > INT32_TOKENS:", "if False:", ["tests/test_glm_sparse.py", "-k", "int32"]),
    "indexer: a pool is selected before it is complete": (
        "glm/context.py", "high = low + (self.places + 1 - starts[mine]) // k", "high = low + (self.places + k - starts[mine]) // k",
        ["tests/test_glm_sparse.py", "-k", "selection_equals"]),
    "sparse attention: gradients of other ranks' queries are lost": (
        "glm/sparse.py", "call.layout.split.reduced(dkeys)", "call.layout.split.take(dkeys)",
        ["tests/test_glm_context.py", "-k", "two_ranks_equal_one and not deepspeed"]),
    "KDA: a tile of the convolution has no halo": (
        "glm/conv.py", "return max(part.start - (weight.shape[1] - 1), 0)", "return part.start",
        ["tests/test_glm_kda.py", "-k", "short_convolution"]),
    "experts: ranks do not agree on the number of chunks": (
        "glm/moe.py", "    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)\n", "",
        ["tests/test_glm_moe.py", "-k", "experts_over_ranks and 2"]),
    "indexer: of equal scores the later pool": (
        "glm/indexer.py", "(ordered.long() << 32) + (n - 1 - columns)", "(ordered.long() << 32) + columns",
        ["tests/test_glm_sparse.py", "-k", "earlier"]),
}


@pytest.mark.slow
@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(tmp_path, name):
    module, before, after, tests = MUTATIONS[name]
    for folder in ("upipe", "tests", "experiments"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "upipe" / module
    source = path.read_text()
    assert source.count(before) == 1, f"{module} no longer has this line once: {before}"
    path.write_text(source.replace(before, after))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and " failed" in done.stdout, f"not noticed (exit {done.returncode}):\n{done.stdout[-2000:]}"
