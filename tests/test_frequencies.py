"""Rotary frequencies stay fp32 where the user or a DeepSpeed setting casts them: in bf16 they turn at other speeds."""

import copy

import pytest
import torch

from tests.plain import tiny_model


def _cast_model(how):
    import deepspeed

    import upipe

    model = tiny_model("llama", 4, 2)
    right = copy.deepcopy(model.model.rotary_emb)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=1))
    engine = model
    if how == "deepspeed":
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 0.0,
                  "data_types": {"buffer_dtype": "bf16"},
                  "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=handle.mpu,
                                          optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model.to(torch.bfloat16)
    rounded = model.model.rotary_emb.inv_freq.dtype
    ids = torch.arange(8)[None] % 50
    engine(input_ids=ids, position_ids=ids + 100_000)
    now = model.model.rotary_emb.inv_freq
    x = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    positions = torch.tensor([[100_000]])
    equal = torch.equal(model.model.rotary_emb(x, positions)[0], right(x, positions)[0])
    handle.remove()
    return rounded == torch.bfloat16, now.dtype == torch.float32, equal


@pytest.mark.parametrize("how", ["deepspeed", "to"])
def test_frequencies_survive_a_cast(worlds, how):
    for was_rounded, is_wide, equal in worlds(1).run(_cast_model, how=how):
        assert was_rounded, "nothing cast the frequencies, so nothing was tested"
        assert is_wide and equal
