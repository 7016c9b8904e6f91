"""What a handle keeps between steps does not go stale."""

import torch
import torch.distributed as dist

from tests.plain import tiny_model
from tests.sharded import gathered


def _positions_changed_in_place():
    import upipe

    model = tiny_model("llama", 4, 2)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=dist.get_world_size()))
    L = 6
    part = slice(handle.sp_rank * L, handle.sp_rank * L + L)
    ids = (torch.arange(2 * L)[None] * 7 % 50)[:, part]
    one = torch.arange(2 * L)[None]
    packed = torch.cat([torch.arange(5), torch.arange(2 * L - 5)])[None]

    def logits(positions):
        with torch.no_grad():
            return gathered(model(input_ids=ids, position_ids=positions).logits, handle.sp_group)

    want_one, want_packed = logits(one[:, part].clone()), logits(packed[:, part].clone())
    assert not torch.allclose(want_one, want_packed, atol=1e-3)
    buffer = one[:, part].clone()
    first = logits(buffer)
    buffer.copy_(packed[:, part])
    second = logits(buffer)
    handle.remove()
    return torch.equal(first, want_one) and torch.equal(second, want_packed)


def test_a_buffer_of_positions_may_be_reused(worlds):
    assert all(worlds(2).run(_positions_changed_in_place))
