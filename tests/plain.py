"""The plain side of every comparison: tiny Hugging Face models, global batches, and their loss and gradients unsharded.

One process, no DeepSpeed, no upipe. Loss = sum of token losses / number of valid tokens, over all data of all
data-parallel ranks and of the whole accumulation window. Packed rows get an explicit block-causal 4-D mask.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 61
CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
           "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def tiny_config(kind, heads, kv_heads, hidden=None, head_dim=None, layers=2, tied=False, **more):
    """A configuration of a model small enough for hundreds of cases.

    Llama and Qwen2 derive the head dim from the hidden size unless told; Qwen3 has one that does not follow from it.
    """
    dim = head_dim or (4 if heads > 8 else 8)
    values = dict(vocab_size=VOCAB, hidden_size=hidden or heads * dim, intermediate_size=48, num_hidden_layers=layers,
                  num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=512,
                  tie_word_embeddings=tied, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if kind == "qwen3":
        values.update(hidden_size=hidden or 40, head_dim=head_dim or 6)
    elif head_dim is not None:
        values.update(head_dim=head_dim)
    return CLASSES[kind][0](**{**values, **more})


@torch.no_grad()
def randomise(model, seed=0):
    """Distinct, sizeable values in every parameter: biases are not 0, norm weights not 1, attention not flat."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim == 2:
            gain = 1.0 if "embed" in name or "lm_head" in name else 1.3
            p.copy_(noise * gain / math.sqrt(p.shape[1]))
        elif "norm" in name:
            p.copy_(1.0 + 0.3 * noise)
        else:
            p.copy_(0.3 * noise)
    return model


def tiny_model(kind, heads, kv_heads, seed=0, attn="eager", dtype=torch.float32, **config):
    """A plain model with the weights of `seed`; the same call gives the same model in every process."""
    torch.manual_seed(seed)
    values = tiny_config(kind, heads, kv_heads, **config)
    values._attn_implementation = attn
    return randomise(CLASSES[kind][1](values), seed).to(dtype)


SEQUENCES = ("even", "odd", "packed", "padded", "batch2")


def batch_of(sequence, seed, longer=0):
    """One global batch of a kind of sequence: a dict of [B, S] tensors as a loader yields them."""
    g = torch.Generator().manual_seed(seed)

    def tokens(rows, length):
        return torch.randint(3, VOCAB, (rows, length), generator=g)

    def some_invalid(labels, first=2):
        """Four places of `first` to `first + 5` without a label in each row: longer batches have more valid tokens."""
        labels = labels.clone()
        for row in labels:
            row[first + torch.randperm(6, generator=g)[:4]] = -100
        return labels

    if sequence == "even":
        ids = tokens(1, 16 + 4 * longer)
        return {"input_ids": ids, "labels": some_invalid(ids)}
    if sequence == "odd":
        length = 13 + 4 * longer
        ids = tokens(1, length)
        return {"input_ids": ids, "labels": some_invalid(ids), "position_ids": torch.arange(length)[None]}
    if sequence == "packed":
        lengths = (5, 1, 9 + longer, 4)
        ids = tokens(1, sum(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        labels = some_invalid(ids, first=8).masked_fill(positions == 0, -100)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    if sequence == "padded":
        length = 14 + longer
        ids = tokens(2, length)
        mask = torch.ones_like(ids)
        mask[0, 9:] = 0
        mask[1, length - 1:] = 0
        return {"input_ids": ids * mask, "labels": some_invalid(ids).masked_fill(mask == 0, -100), "attention_mask": mask}
    if sequence == "batch2":
        length = 11 + longer
        ids = tokens(2, length)
        positions = torch.stack([torch.arange(length), torch.cat([torch.arange(4), torch.arange(length - 4)])])
        return {"input_ids": ids, "labels": some_invalid(ids), "position_ids": positions}
    raise ValueError(f"sequence kind {sequence!r} is not one of {SEQUENCES}")


def data_of(sequence, dp_size, accumulation, seed=100):
    """`data[dp rank][micro-batch]`: every batch different, with its own length and number of valid tokens."""
    return [[batch_of(sequence, seed + 10 * dp + micro, longer=dp + micro) for micro in range(accumulation)]
            for dp in range(dp_size)]


def positions_of(batch):
    ids = batch["input_ids"]
    if batch.get("position_ids") is not None:
        return batch["position_ids"]
    return torch.arange(ids.shape[1]).expand_as(ids)


def block_causal(positions, dtype=torch.float32, window=None):
    """[B, 1, S, S] additive mask: causal, inside one document (a document starts where positions reset) and, with a
    window, over the token itself and the window - 1 before it."""
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    document = starts.cumsum(1)
    length = positions.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None, :])
    if window is not None:
        seen &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


def masks_of(config, positions, dtype):
    """The mask that a model of this configuration takes: one, or one a kind of layer where its layers differ."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds:
        return {"full_attention": block_causal(positions, dtype), "sliding_attention": block_causal(positions, dtype, window)}
    one_window = config.model_type in ("mistral", "phi3")
    return block_causal(positions, dtype, window if one_window else None)


def shifted(batch):
    """[B, S] targets: the next token's label, -100 in the last place; `shift_labels` win over `labels`."""
    if batch.get("shift_labels") is not None:
        return batch["shift_labels"]
    return F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]


def plain_logits(model, batch):
    """The model's logits. An sdpa model takes no packed rows: it gets no mask, so that long rows need no S x S memory."""
    positions = positions_of(batch)
    dtype = next(model.parameters()).dtype
    if model.config._attn_implementation == "sdpa":
        assert torch.equal(positions, torch.arange(positions.shape[1]).expand_as(positions))
        return model(input_ids=batch["input_ids"], use_cache=False).logits
    return model(input_ids=batch["input_ids"], position_ids=positions, attention_mask=masks_of(model.config, positions, dtype),
                 use_cache=False).logits


@dataclass
class Plain:
    loss: float
    valid: int
    grads: dict       # parameter name -> gradient
    logits: list      # logits[dp rank][micro-batch], [B, S, V]

    @property
    def norm(self):
        return math.sqrt(sum(g.double().square().sum().item() for g in self.grads.values()))


def plain_step(model, data):
    """Loss and every gradient of the token mean over `data[dp rank][micro-batch]`."""
    model.zero_grad(set_to_none=True)
    valid = sum(int((shifted(b) != -100).sum()) for row in data for b in row)
    total, logits = 0.0, []
    for row in data:
        logits.append([])
        for batch in row:
            out = plain_logits(model, batch)
            loss = F.cross_entropy(out.flatten(0, 1).float(), shifted(batch).flatten(), ignore_index=-100, reduction="sum")
            (loss / max(valid, 1)).backward()
            total += loss.item()
            logits[-1].append(out.detach())
    grads = {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Plain(total / max(valid, 1), valid, grads, logits)


def relative_error(a, b):
    """norm(a - b) / norm(b), in double; where b is all zero, the largest |a|."""
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    norm = b.norm()
    return float((a - b).norm() / norm) if norm > 0 else float(a.abs().max())


def assert_close(name, a, b, tolerance=1e-5, zero_tolerance=1e-7):
    """Relative error of a against b; absolute where b is all zero. NaN fails."""
    error = relative_error(a, b)
    allowed = tolerance if bool((b != 0).any()) else zero_tolerance
    assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.0e}"
