"""The causal LM on one rank: logits, loss and gradients against transformers' backbone with both attention kinds, published
weights' names, what the configuration must say, presets, recompute."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.glm5_next import modeling_glm5_next as hf

from tests.glm import SPARSE, hf_logits, randomise, relative, tiny_config
from upipe.glm import Glm5NextForCausalLM, GlmRuntime, GlmSettings, GlmTextConfig, TokenSplit, indexer, preset, selection_contexts
from upipe.glm.kda import KDAConfig
from upipe.glm.model import check_projections
from upipe.glm.moe import MoEConfig
from upipe.offload import apply_checkpointing
from upipe.preflight import PreflightError

TOKENS = 93


def models(**config):
    """Ours, and transformers' backbone with the same weights."""
    ours = randomise(Glm5NextForCausalLM(tiny_config(**config)))
    plain = hf.Glm5NextTextModel(ours.config)
    plain.load_state_dict(ours.model.state_dict())
    return ours, plain


def ids_of(rows=1, tokens=TOKENS):
    return torch.randint(0, 61, (rows, tokens), generator=torch.Generator().manual_seed(5))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_whole_model_equals_transformers():
    ours, plain = models()
    kinds = ours.config.layer_types, ours.config.mlp_layer_types
    assert all(len(set(kind)) == 2 for kind in kinds) and ours.config.index_topk < TOKENS
    small = dict(kda=KDAConfig(heads_per_group=3, tile_tokens=20), moe=MoEConfig(25), hyper_tile_tokens=40)
    ours.use(GlmRuntime(GlmSettings(gather_bytes=7 * 4 * 19 * 16, score_bytes=5 * 4 * 32 * 23, loss_tile_tokens=40, **small)))
    ids = ids_of()
    logits, expected = ours(ids).logits, hf_logits(plain, ours.lm_head.weight, ids)
    assert relative(logits, expected) <= 1e-5
    wanted = F.cross_entropy(expected[0, :-1], ids[0, 1:])
    loss = ours(ids, labels=ids).loss
    assert abs(loss.item() - wanted.item()) <= 1e-5 * wanted.item()
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    assert abs(ours(ids, shift_labels=shifted).loss.item() / (TOKENS - 1) - wanted.item()) <= 1e-5 * wanted.item()
    loss.backward()
    wanted.backward()
    got, expected = gradients(ours), {f"model.{name}": grad for name, grad in gradients(plain).items()}
    expected["lm_head.weight"] = got["lm_head.weight"]
    assert set(got) == set(expected) and not any("indexer" in name for name in got)
    for name in expected:
        assert relative(got[name], expected[name]) <= 1e-4, (name, relative(got[name], expected[name]))
    assert ours.runtime.ran == {SPARSE: "sparse, kernel gather", "linear_attention": "KDA, kernel torch, 3 heads of a rank at a time"}


def test_packed_documents_equal_each_by_itself():
    ours, plain = models(layers=4)
    ids, starts = ids_of(), (0, 3, 50, TOKENS)
    positions = torch.cat([torch.arange(b - a) for a, b in zip(starts, starts[1:])])[None]
    assert relative(ours(ids, positions).logits, hf_logits(plain, ours.lm_head.weight, ids, starts)) <= 1e-5


SHORT = [(1, None), (3, None), (4, None), (17, None), (20, (0, 1, 2, 3, 7, 8, 20)), (6, tuple(range(7)))]


@pytest.mark.parametrize("tokens, starts", SHORT)
def test_short_rows_and_documents_of_one_token_equal_transformers(tokens, starts):
    """Fewer tokens than a pool, than the convolution's taps, than index_topk."""
    ours, plain = models(layers=4)
    ids, starts = ids_of(2, tokens), starts or (0, tokens)
    positions = torch.cat([torch.arange(b - a) for a, b in zip(starts, starts[1:])])[None]
    weights = torch.randn(2, tokens, 61, generator=torch.Generator().manual_seed(6))
    logits, expected = ours(ids, positions).logits, hf_logits(plain, ours.lm_head.weight.detach(), ids, starts)
    assert relative(logits, expected) <= 1e-5
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    got, wanted = gradients(ours.model), gradients(plain)
    assert set(got) == set(wanted)
    # A query that sees one key has no gradient, but for rounding.
    assert all(relative(got[n], g) <= 1e-4 or (got[n] - g).norm() <= 1e-4 for n, g in wanted.items())


@pytest.mark.parametrize("contexts", [selection_contexts, None])
def test_recompute_is_bit_equal(contexts, monkeypatch):
    ours, _ = models(layers=4)
    ids, calls = ids_of(), []
    select = indexer.select
    monkeypatch.setattr(indexer, "select", lambda *a: calls.append(1) or select(*a))
    ours(ids, labels=ids).loss.backward()
    expected = gradients(ours)
    ours.zero_grad()
    handle = apply_checkpointing(ours, **({"contexts": contexts} if contexts else {}))
    ours(ids, labels=ids).loss.backward()
    got = gradients(ours)
    handle.remove()
    assert set(got) == set(expected) and all(torch.equal(got[name], expected[name]) for name in got)
    assert len(calls) == (2 if contexts else 3)


def published(state, prefix):
    """The names and tensors of a published checkpoint: experts, convolutions and hyper-connections apart."""
    out = {}
    for name, t in state.items():
        name = re.sub(r"^model\.", prefix, name).replace("forget_gate.", "")
        name = re.sub(r"(attn|ffn)_hc\.(fn|base|scale)", r"hc_\1_\2", name)
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(t):
                for part, w in zip(("gate", "up"), both.chunk(2)):
                    out[name.replace("gate_up_proj", f"{e}.{part}_proj.weight")] = w.clone()
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): w.clone() for e, w in enumerate(t)}
        elif "conv1d" in name:
            out |= {name.replace("conv1d", f"{c}_conv1d"): w.clone() for c, w in zip("qkv", t.chunk(3))}
        else:
            out[name] = t.clone()
    return out


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_published_weights_load_and_are_saved_under_their_names(tmp_path, prefix):
    """prefix: of a text-only checkpoint with flat configuration, and of the vision-language model's."""
    ours, _ = models(layers=4)
    here, there = tmp_path / "here", tmp_path / "there"
    ours.config.save_pretrained(here)
    values = json.loads((here / "config.json").read_text())
    if prefix == "model.":
        kda = {"num_heads": values.pop("linear_num_heads"), "head_dim": values.pop("linear_head_dim"), "short_conv_kernel_size": 4}
        kinds = [kind.replace("indexed", "deepseek_sparse") for kind in values["layer_types"]]
        values |= {"model_type": "glm5_next", "linear_attn_config": kda, "layer_types": kinds}
    else:
        values = {"model_type": "glm5_next", "text_config": values}
    (here / "config.json").write_text(json.dumps(values))
    names = published(ours.state_dict(), prefix)
    mtp = {f"{prefix}layers.45.eh_proj.weight": torch.zeros(2)}
    save_file({**names, **mtp}, here / "model.safetensors", metadata={"format": "pt"})

    loaded = Glm5NextForCausalLM.from_pretrained(here)
    expected = ours.state_dict()
    assert set(loaded.state_dict()) == set(expected) and all(torch.equal(t, expected[n]) for n, t in loaded.state_dict().items())
    frozen = [[n for n, p in model.named_parameters() if not p.requires_grad] for model in (loaded, ours)]
    assert frozen[0] == frozen[1] and len(frozen[0]) == 7 and all(".indexer." in name for name in frozen[0])
    loaded.save_pretrained(there)
    saved = load_file(there / "model.safetensors")
    assert set(saved) == set(names) and all(torch.equal(t, names[n]) for n, t in saved.items())
    if prefix == "model.":      # there the configuration is flat, and a keyword changes it
        shallow = Glm5NextForCausalLM.from_pretrained(here, num_hidden_layers=2)
        assert len(shallow.model.layers) == 2 and torch.equal(shallow.lm_head.weight, ours.lm_head.weight)
    save_file({**names, f"{prefix}layers.0.mlp.up_proj.bias": torch.zeros(96)}, here / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="has 1 weights that Glm5NextForCausalLM does not, model.layers.0.mlp.up_proj.bias among them"):
        Glm5NextForCausalLM.from_pretrained(here)
    names.pop(f"{prefix}norm.weight")
    save_file(names, here / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights of Glm5NextForCausalLM, model.norm.weight among them"):
        Glm5NextForCausalLM.from_pretrained(here)
    if prefix == "model." and get_checkpoint_conversion_mapping("glm5_next_text"):      # transformers 5.17 has none for it
        theirs = hf.Glm5NextTextModel.from_pretrained(there).state_dict()
        assert all(torch.equal(t, expected[f"model.{n}"]) for n, t in theirs.items())


def test_the_pool_size_is_read_and_never_defaulted(tmp_path):
    with pytest.raises(ValueError, match="index_kpool is not given.*GLM-5.3-Flash has 4"):
        GlmTextConfig(hidden_size=64)
    models(layers=4)[0].save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["index_kpool"] == 4
    for given, error in (({}, "index_kpool is not given"), ({"index_kpool": 8}, "ignore_mismatched_sizes")):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "index_kpool"} | given))
        with pytest.raises((ValueError, RuntimeError), match=error):
            Glm5NextForCausalLM.from_pretrained(tmp_path)


def test_presets_have_the_published_numbers():
    sizes = {}
    for name in ("glm-5.3-flash", "glm-mini"):
        with torch.device("meta"):
            model = Glm5NextForCausalLM(preset(name))
        counts = {n: p.numel() for n, p in model.named_parameters()}
        experts = sum(n for name, n in counts.items() if ".experts." in name)
        c = model.config
        assert c.index_kpool == 4
        sizes[name] = sum(counts.values()), sum(counts.values()) - experts + experts * c.num_experts_per_tok // c.n_routed_experts
    assert [round(n / 1e9, 1) for n in sizes["glm-5.3-flash"]] == [313.3, 17.4]
    assert round(sizes["glm-mini"][0] / 1e9, 2) == 0.24
    c = preset("glm-5.3-flash")
    assert [i for i, kind in enumerate(c.layer_types) if kind == SPARSE] == list(range(3, 45, 4))
    with pytest.raises(ValueError, match="preset 'glm-5' is none of glm-5.3-flash, glm-mini"):
        preset("glm-5")


def test_what_is_refused():
    ours, _ = models(layers=4)
    ids = ids_of()
    with pytest.raises(PreflightError, match="attention_mask and use_cache are not taken"):
        ours(ids, attention_mask=torch.ones_like(ids))
    ours.use(GlmRuntime(split=TokenSplit(None, 2, 1, 0)))
    with pytest.raises(PreflightError, match="rows over several ranks need position_ids"):
        ours(ids)
    with pytest.raises(TypeError, match="logits_to_keep"):
        ours(ids, logits_to_keep=1)
    with pytest.raises(ValueError, match="index_kpool_always_select_tail=False with index_kpool=4: the first 3 tokens"):
        Glm5NextForCausalLM(tiny_config(index_kpool_always_select_tail=False))
    with pytest.raises(ValueError, match="output_router_logits=True"):
        Glm5NextForCausalLM(tiny_config(output_router_logits=True))
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        Glm5NextForCausalLM(tiny_config(attention_dropout=0.1))
    with pytest.raises(ValueError, match="hidden_act='gelu'.*set it to silu"):
        Glm5NextForCausalLM(tiny_config(hidden_act="gelu"))
    for settings, says in (
        (GlmSettings(kernel="flash"), "kernel='flash': use auto, gather"),
        (GlmSettings(kda=KDAConfig(kernel="flash")), "KDA kernel 'flash' is unknown: use auto, torch, fla"),
        (GlmSettings(kda=KDAConfig(tile_tokens=2)), "tile_tokens=2 with 4 taps.*at least 3"),
    ):
        with pytest.raises(PreflightError, match=says):
            ours.use(GlmRuntime(settings))


def test_inputs_that_do_not_belong_together_are_refused():
    ours, _ = models(layers=2)
    ids = ids_of(2)
    whole = torch.arange(TOKENS)
    for positions in (torch.arange(TOKENS + 4)[None], whole[None, 4:], whole.expand(3, -1), whole):
        with pytest.raises(PreflightError, match=r"position_ids are .* with 2 rows of 93 tokens: give integers, \(1, 93\) or \(2, 93\)"):
            ours(ids, positions)
    with pytest.raises(PreflightError, match=r"position_ids are torch.bfloat16 \(1, 93\)"):
        ours(ids, torch.arange(TOKENS)[None].bfloat16())
    for given in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(2, TOKENS, 64)}):
        with pytest.raises(PreflightError, match="give input_ids or inputs_embeds, one of the two"):
            ours(**given)
    assert torch.equal(ours(inputs_embeds=ours.model.embed_tokens(ids)).logits, ours(ids).logits)


def test_shift_labels_go_before_labels_and_none_valid_is_zero():
    ours, _ = models(layers=2)
    ids, none = ids_of(), torch.full((1, TOKENS), -100)
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    assert torch.equal(ours(ids, labels=none, shift_labels=shifted).loss, ours(ids, shift_labels=shifted).loss)
    for given in ({"labels": none}, {"shift_labels": none}):
        ours.zero_grad()
        loss = ours(ids, **given).loss
        loss.backward()
        assert loss == 0 and not any(grad.any() for grad in gradients(ours).values()) and gradients(ours)


class Adapter(torch.nn.Module):
    """As an adapter's layer: its `weight` is the base layer's and not all that it computes."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return 2 * self.base_layer(x)


USED = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.forget_gate.f_b_proj", "model.layers.3.mlp.shared_experts.up_proj",
        "model.layers.3.self_attn.kv_b_proj"]  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_what_a_weight_does_not_say_is_refused(name):
    """Adapters, biases and hooks on layers whose weights are used without calling them."""
    ours, _ = models(layers=4)
    ids, (parent, _, child) = ids_of(), name.rpartition(".")
    holder, layer = ours.get_submodule(parent), ours.get_submodule(name)
    handle = layer.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(PreflightError, match=f"{child} has forward hooks: its weight is used without calling it"):
        check_projections(ours)
    handle.remove()
    check_projections(ours)
    setattr(holder, child, Adapter(layer))
    with pytest.raises(PreflightError, match=f"{child} of a .* is a Adapter, not a plain Linear"):
        ours(ids)
    setattr(holder, child, torch.nn.Linear(layer.in_features, layer.out_features))
    with pytest.raises(PreflightError, match=f"{child} of a .* has a bias"):
        ours(ids)
