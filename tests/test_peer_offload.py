"""The offload of other libraries, as the benchmark puts it on: gradients stay, and what it sends is counted."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils

from experiments.peer_offload import PeerOffload

LAYERS, TOKENS, HIDDEN = 3, 24, 32


def model_of(device="cpu"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def gradients_of(model, offload=None):
    device = next(model.parameters()).device
    ids = torch.randint(64, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    model.zero_grad()
    if offload is None:
        model(input_ids=ids, labels=ids).loss.backward()
    else:
        with offload.context():
            model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("peer", ["transformers", "deepspeed"])
def test_gradients_are_the_plain_model_s(peer):
    model = model_of()
    plain = gradients_of(model)
    calls = []

    def contexts():
        calls.append(peer)
        return torch.enable_grad(), torch.enable_grad()

    offload = PeerOffload(model, peer, contexts)
    for _ in range(2):
        found = gradients_of(model, offload)
        assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert calls == [peer] * 2 * LAYERS, "every layer is checkpointed, with the contexts given"
    assert offload.last["bytes_to_host"] == 0, "without a GPU there is nowhere to copy from"
    assert offload.last["calls"] >= LAYERS if peer == "transformers" else offload.last["skipped"] >= LAYERS
    assert modeling_utils.save_on_cpu is save_on_cpu
    offload.remove()
    calls.clear()
    assert all(torch.equal(grad, plain[name]) for name, grad in gradients_of(model).items()) and not calls


def test_another_peer_is_refused():
    with pytest.raises(ValueError, match="transformers or deepspeed"):
        PeerOffload(model_of(), "accelerate")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("peer,kept", [("transformers", 0), ("deepspeed", 1)])
def test_gpu_inputs_are_sent(peer, kept):
    model = model_of("cuda")
    plain = gradients_of(model)
    offload = PeerOffload(model, peer)
    found = gradients_of(model, offload)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    # transformers sends what else a layer saves as well, such as cos and sin.
    inputs = (LAYERS - kept) * TOKENS * HIDDEN * 4
    assert offload.last["bytes_to_host"] == offload.last["bytes_to_device"]
    assert offload.last["bytes_to_host"] == inputs if peer == "deepspeed" else offload.last["bytes_to_host"] >= inputs
    offload.remove()
