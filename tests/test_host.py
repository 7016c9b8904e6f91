"""Host memory for copies: exact sizes, reuse, bookkeeping, and a failed registration said as what it is."""

import gc

import psutil
import pytest
import torch

from upipe import host
from upipe.outcomes import classify

PAGE = host.PAGE


def test_sizes_are_exact_to_the_page():
    pool = host.HostPool()
    a = pool.take((3, 5, 7), torch.bfloat16)
    assert a.shape == (3, 5, 7) and a.dtype is torch.bfloat16 and a.is_contiguous() and a.device.type == "cpu"
    assert pool.held_bytes == pool.pinned_bytes == PAGE
    b = pool.take(PAGE + 1, torch.uint8, pinned=False)
    assert pool.held_bytes == 3 * PAGE and pool.pinned_bytes == PAGE
    empty = pool.take((0, 4), torch.float32)
    assert empty.shape == (0, 4) and pool.held_bytes == 4 * PAGE
    assert a.data_ptr() % PAGE == b.data_ptr() % PAGE == 0
    a.fill_(1.5), b.fill_(7)
    assert float(a.float().sum()) == 1.5 * 105 and int(b.sum()) == 7 * (PAGE + 1)


def test_a_block_is_reused_by_bytes_and_kind():
    pool = host.HostPool()
    a = pool.take((4, PAGE), torch.float32)
    address = a.data_ptr()
    pool.give(a)
    unpinned = pool.take((4, PAGE), torch.float32, pinned=False)
    other = pool.take((8, PAGE), torch.float32)
    assert address not in (unpinned.data_ptr(), other.data_ptr())
    again = pool.take((16 * PAGE,), torch.uint8)
    assert again.data_ptr() == address
    assert pool.held_bytes == 64 * PAGE and pool.pinned_bytes == 48 * PAGE


def test_clear_returns_the_free_blocks_and_leaves_those_in_use(monkeypatch):
    unregistered = []
    monkeypatch.setattr(host, "_unregister", unregistered.append)
    pool = host.HostPool()
    used, free, plain = pool.take(PAGE, torch.uint8), pool.take(2 * PAGE, torch.uint8), pool.take(PAGE, torch.uint8, pinned=False)
    address = free.data_ptr()
    pool.give(free), pool.give(plain)
    pool.clear()
    assert unregistered == [address]
    assert pool.held_bytes == pool.pinned_bytes == PAGE
    used.fill_(1)
    pool.give(used, keep=False)
    assert pool.held_bytes == pool.pinned_bytes == 0 and len(unregistered) == 2


def test_everything_is_unregistered_when_the_process_ends(monkeypatch):
    unregistered = []
    monkeypatch.setattr(host, "_unregister", unregistered.append)
    pool = host.HostPool()
    used, free = pool.take(PAGE, torch.uint8), pool.take(PAGE, torch.uint8)
    pool.give(free)
    pool._at_exit()
    assert sorted(unregistered) == sorted([used.data_ptr(), free.data_ptr()])


def test_memory_really_goes_back():
    pool, process = host.HostPool(), psutil.Process()
    before = process.memory_info().rss
    tensor = pool.take(192 << 20, torch.uint8, pinned=False).fill_(1)
    assert process.memory_info().rss - before > 150 << 20
    pool.give(tensor, keep=False)
    del tensor
    gc.collect()
    assert process.memory_info().rss - before < 50 << 20


def test_giving_back_what_is_not_the_pools_is_refused():
    pool = host.HostPool()
    with pytest.raises(ValueError, match="did not hand out"):
        pool.give(torch.empty(3))
    a = pool.take(3, torch.float32)
    pool.give(a)
    with pytest.raises(ValueError, match="given back before"):
        pool.give(a)


def test_a_failed_registration_says_pinned_host_memory_and_the_numbers(monkeypatch):
    """T41: pinning fails, and the message and the outcome say pinned, not device."""
    pool = host.HostPool()
    held = pool.take(4 * PAGE, torch.uint8)
    monkeypatch.setattr(host, "_register", lambda address, nbytes: "out of memory (2)")
    with pytest.raises(host.PinnedHostMemoryError) as caught:
        pool.take(9 << 28, torch.uint8)
    message = str(caught.value)
    for said in ("pinned host memory", str(9 << 28), "2.25 GiB", f"{4 * PAGE} bytes", "ulimit -l", "offload: pageable"):
        assert said in message, message
    assert "\n" not in message
    outcome, reason = classify(caught.value)
    assert outcome == "oom_pinned" and "pinned host memory" in reason
    assert pool.held_bytes == pool.pinned_bytes == 4 * PAGE
    pool.give(held)


@pytest.mark.parametrize("memory", host.WORKS)
def test_a_failed_registration_says_what_the_memory_was_for_and_what_works_there(monkeypatch, memory):
    monkeypatch.setattr(host, "_register", lambda address, nbytes: "out of memory (2)")
    with pytest.raises(host.PinnedHostMemoryError, match=f"pinned host memory for {memory}: cudaHostRegister of {PAGE} bytes") as caught:
        host.HostPool().take(PAGE, torch.uint8, memory=memory)
    assert caught.value.memory == memory and classify(caught.value)[0] == "oom_pinned"
    assert str(caught.value).endswith(f"Use {host.WORKS[memory]}")
    # These two serve the saved inputs alone.
    assert ("pinned_fallback" in str(caught.value)) == (memory == host.SAVED)
    assert ("offload: pageable" in str(caught.value)) == (memory in (host.SAVED, host.WORKING))


def test_free_pinned_blocks_are_given_up_before_failing(monkeypatch):
    """One block may be pinned at a time: a free one of another size makes way, one in use does not."""
    registered = set()

    def register(address, nbytes):
        if registered:
            return "out of memory (2)"
        registered.add(address)

    monkeypatch.setattr(host, "_register", register)
    monkeypatch.setattr(host, "_unregister", registered.remove)
    pool = host.HostPool()
    pool.give(pool.take(PAGE, torch.uint8))
    second = pool.take(2 * PAGE, torch.uint8)
    assert pool.pinned_bytes == 2 * PAGE and registered == {second.data_ptr()}
    with pytest.raises(host.PinnedHostMemoryError):
        pool.take(PAGE, torch.uint8)


def test_one_pool_a_process():
    assert host.pool() is host.pool()
