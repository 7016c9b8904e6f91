"""Is the sharded model as accurate as the unsharded one? Output, loss and every gradient, tensor by tensor.

For each case the same weights and inputs go through
  - the plain Hugging Face model in fp32: the truth;
  - the plain Hugging Face model in bf16: what bf16 costs without us;
  - the same model under UPipe over all ranks, in the precision asked for.
Two scopes: one attention block with random inputs and output gradients (nothing else adds error, so this is the sharp
one), and a whole model with its loss.
bf16 passes if no tensor's error (gradients, logits, block outputs) is more than 1.2 times the plain bf16 model's own;
fp32 passes at 1e-5 (loss) and 1e-4 (tensors). The bf16 loss, one number and so a draw of luck, is recorded and not
judged. Errors are norm(a-b)/norm(b), over all batches of a case together.

    torchrun --standalone --nproc_per_node 2 -m experiments.parity --kernels fa4 cudnn flash

Every case appends a record to `parity.jsonl` (outcome ok: it ran; `passed` says how it went), all of one call under one
run_id.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
import sys
import time

import torch
import torch.distributed as dist
import transformers

import upipe
from experiments.runs import command_line, new_run_id
from upipe import kernels, models, records, workspace
from upipe.config import ConfigError
from upipe.environment import code, environment
from upipe.records import Record

# Class prefix, attention of the plain model, and what else the configuration gets.
MODELS = {
    "llama": ("Llama", "sdpa", {}),
    "qwen2": ("Qwen2", "sdpa", {}),
    "qwen3": ("Qwen3", "sdpa", {}),
    "mistral": ("Mistral", "sdpa", {"sliding_window": 1000}),
    "gemma2": ("Gemma2", "eager", {"sliding_window": 1000, "attn_logit_softcapping": 5.0}),
    "gpt_oss": ("GptOss", "eager", {"sliding_window": 1000, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
BOUND_BF16 = 1.2
BOUND_LOSS_FP32, BOUND_GRAD_FP32 = 1e-5, 1e-4


def build(kind: str, heads: int, kv_heads: int, head_dim: int, layers: int, seed: int) -> torch.nn.Module:
    """A plain fp32 model with distinct weights everywhere, each representable in bf16."""
    prefix, attention, special = MODELS[kind]
    shape = dict(
        vocab_size=512, hidden_size=heads * head_dim, intermediate_size=2 * heads * head_dim, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=False, max_position_embeddings=1 << 20,
        **special,
    )
    if kind != "qwen2":
        shape["head_dim"] = head_dim
    if kind == "qwen3":
        shape["hidden_size"] = heads * head_dim // 2
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**shape, attn_implementation=attention)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
            parameter.copy_(parameter.bfloat16())
    return model


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Parameters in dtype, buffers as they are: `from_pretrained(dtype=...)` leaves the rotary frequencies in fp32 too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def plain_gradients(model, ids, device) -> tuple[float, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model).to(device)
    outputs = model(input_ids=ids, labels=ids, use_cache=False)
    outputs.loss.backward()
    grads = {name: p.grad.float() for name, p in model.named_parameters()}
    return outputs.loss.item(), {"logits": outputs.logits.detach().float(), **grads}


def sharded_gradients(model, ids, config, device) -> tuple[float, dict[str, torch.Tensor], dict[str, str]]:
    model = copy.deepcopy(model).to(device)
    handle = upipe.apply(model, config)
    (batch,) = handle.shard([{"input_ids": ids.cpu(), "labels": ids.cpu()}])
    loss = handle.loss(model, batch)
    loss.backward()
    grads = {name: p.grad.float() for name, p in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.float()
    ran, grads["logits"] = handle.kernels, _gather_tokens(logits, handle)[:, : ids.shape[1]]
    handle.remove()
    return loss.item(), grads, ran


def plain_block(model, x, grad, positions, device) -> dict[str, torch.Tensor]:
    """Output and gradients of the first layer's attention, unsharded. x, grad: [1, S, D] fp32."""
    attention, angles = _first_attention(copy.deepcopy(model).to(device))
    x = x.to(next(attention.parameters()).dtype, copy=True).requires_grad_()
    mask = _plain_mask(attention, x)
    y, _ = attention(hidden_states=x, position_embeddings=_angles(angles, x, positions), attention_mask=mask)
    y.backward(grad.to(y.dtype))
    return _named(attention, y, x)


def sharded_block(model, x, grad, positions, config, device) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The same under UPipe: every rank its tokens; y and dx gathered, parameter gradients summed."""
    model = copy.deepcopy(model).to(device)
    handle = upipe.apply(model, config)
    attention, angles = _first_attention(model)
    L = x.shape[1] // handle.sp_size
    part = slice(handle.sp_rank * L, handle.sp_rank * L + L)
    x = x[:, part].to(next(attention.parameters()).dtype, copy=True).requires_grad_()
    mine = positions[:, part].contiguous()
    y, _ = attention(hidden_states=x, position_embeddings=_angles(angles, x, mine), attention_mask=None, position_ids=mine)
    y.backward(grad[:, part].to(y.dtype))
    tensors = _named(attention, y, x)
    for name, tensor in tensors.items():
        if name in ("y", "dx"):
            tensors[name] = _gather_tokens(tensor, handle)
        else:
            dist.all_reduce(tensor)
    ran = handle.kernels
    handle.remove()
    return tensors, ran


def _gather_tokens(tensor, handle) -> torch.Tensor:
    """[1, L, c] of every rank -> [1, S, c]."""
    shards = [torch.empty_like(tensor) for _ in range(handle.sp_size)]
    dist.all_gather(shards, tensor.contiguous(), group=handle.sp_group)
    return torch.cat(shards, dim=1)


def _first_attention(model):
    return model.model.layers[0].self_attn, model.model.rotary_emb


def _plain_mask(attention, x) -> torch.Tensor | None:
    """[1, 1, S, S] additive, or None where the plain attention is causal by itself."""
    window = models.of_attention(type(attention)).window(attention)
    if window is None and attention.config._attn_implementation == "sdpa":
        return None
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    if window is not None:
        seen &= torch.ones_like(seen).triu(1 - window)
    return torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)[None, None]


def _angles(rotary, x, positions) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as a bf16 model has them, in x's dtype: their rounding is an input like the weights'."""
    return tuple(t.to(x.dtype) for t in rotary(x.bfloat16(), positions))


def _named(attention, y, x) -> dict[str, torch.Tensor]:
    grads = {name: p.grad.float() for name, p in attention.named_parameters()}
    return {"y": y.detach().float(), "dx": x.grad.float(), **grads}


def run_case(kind, heads, kv_heads, head_dim, kernel, dtype, scope, tokens, batches, layers, heads_per_stage, device) -> Record:
    world = dist.get_world_size()
    if heads_per_stage is not None:
        heads_per_stage = max(world, heads_per_stage // world * world)
    config = upipe.UPipeConfig(sp_size=world, heads_per_stage=heads_per_stage, kernel=kernel)
    squares: dict[str, list[float]] = {}
    losses = []
    ran: dict[str, str] = {}
    start = time.perf_counter()
    for index in range(batches):
        model = build(kind, heads, kv_heads, head_dim, layers, seed=index)
        generator = torch.Generator().manual_seed(index)
        typed = cast(copy.deepcopy(model), dtype)
        if scope == "block":
            shape = (1, tokens // world * world, model.config.hidden_size)
            x, grad = (torch.randn(shape, generator=generator).bfloat16().float().to(device) for _ in range(2))
            positions = torch.arange(shape[1], device=device)[None]
            truth = plain_block(model, x, grad, positions, device)
            plain = plain_block(typed, x, grad, positions, device)
            ours, ran = sharded_block(typed, x, grad, positions, config, device)
        else:
            ids = torch.randint(0, 512, (1, tokens), generator=generator).to(device)
            true_loss, truth = plain_gradients(model, ids, device)
            plain_loss, plain = plain_gradients(typed, ids, device)
            our_loss, ours, ran = sharded_gradients(typed, ids, config, device)
            losses.append((true_loss, plain_loss, our_loss))
        for name, true in truth.items():
            sums = squares.setdefault(name, [0.0, 0.0, 0.0])
            sums[0] += true.square().sum().item()
            sums[1] += (plain[name] - true).square().sum().item()
            sums[2] += (ours[name] - true).square().sum().item()
    errors = {name: (math.sqrt(p / n), math.sqrt(o / n)) for name, (n, p, o) in squares.items()}
    loss_error = tuple(max((abs(row[i] - row[0]) / row[0] for row in losses), default=0.0) for i in (1, 2))
    if dtype == torch.float32:
        worst = max(errors, key=lambda name: errors[name][1])
        passed = loss_error[1] <= BOUND_LOSS_FP32 and errors[worst][1] <= BOUND_GRAD_FP32
    else:
        worst = max(errors, key=lambda name: errors[name][1] / errors[name][0])
        passed = errors[worst][1] <= BOUND_BF16 * errors[worst][0]
    used, width, type_name = sorted(set(ran.values())), heads_per_stage or world, str(dtype).removeprefix("torch.")
    return Record(
        experiment="parity", method="upipe", model=kind, layers=layers, tokens=tokens, sp=world, ring=1, dp=1,
        heads_per_stage=width, kernel=used[0] if len(used) == 1 else None, attention_output="device", offload="none",
        dtype=type_name,
        extra={
            "point": f"{scope}-{kind}-{heads}-{kv_heads}-d{head_dim}-U{width}-{kernel}-{type_name}-{layers}x{tokens}x{batches}",
            "scope": scope, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batches": batches, "kernels": used,
            "passed": passed, "worst": worst, "worst_plain_error": errors[worst][0], "worst_error": errors[worst][1],
            "median_plain_error": sorted(e[0] for e in errors.values())[len(errors) // 2],
            "median_error": sorted(e[1] for e in errors.values())[len(errors) // 2],
            "loss_plain_error": loss_error[0], "loss_error": loss_error[1],
            "errors": {n: [round(v, 7) for v in e] for n, e in errors.items()},
            "seconds": round(time.perf_counter() - start, 2),
        },
    )


def run_repeats(kernel, tokens, repeats, device) -> Record:
    """The sharded block again and again on one input, stages overlapping, from a workspace full of NaN each time.

    With a kernel that has a deterministic order (asked for by torch.use_deterministic_algorithms) every repeat must give the
    first one's bits. Of the others the spread must be within that of the same block one stage at a time.
    """
    world, start = dist.get_world_size(), time.perf_counter()
    chosen = kernels.select(kernel, kernels.Case.of(torch.empty(0, dtype=torch.bfloat16, device=device), 128))
    typed = cast(build("llama", 8, 2, 128, 1, seed=0), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens // world * world, typed.config.hidden_size)
    x, grad = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    positions = torch.arange(shape[1], device=device)[None]

    def spread(overlap: bool) -> float:
        config = upipe.UPipeConfig(sp_size=world, kernel=kernel, overlap=overlap)
        worst, first = 0.0, None
        for _ in range(repeats):
            workspace.poison()
            got, _ = sharded_block(typed, x, grad, positions, config, device)
            first = first or got
            worst = max(worst, *((got[n] - first[n]).norm().item() / first[n].norm().item() for n in first))
        return worst

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(chosen.deterministic != "unknown", warn_only=True)
    try:
        with_overlap = spread(True)
        without = spread(False) if chosen.deterministic == "unknown" else 0.0
    finally:
        torch.use_deterministic_algorithms(before)
    return Record(
        experiment="parity", method="upipe", model="llama", layers=1, tokens=tokens, sp=world, ring=1, dp=1, heads_per_stage=world,
        kernel=chosen.name, attention_output="device", overlap=True, offload="none", dtype="bfloat16",
        extra={
            "point": f"repeat-{kernel}-{tokens}x{repeats}", "scope": "repeat", "heads": 8, "kv_heads": 2, "head_dim": 128,
            "batches": repeats, "kernels": [chosen.name], "deterministic": chosen.deterministic,
            "passed": with_overlap <= 1.5 * without, "worst": "any", "worst_plain_error": without, "worst_error": with_overlap,
            "median_plain_error": without, "median_error": with_overlap, "loss_plain_error": 0.0, "loss_error": 0.0,
            "seconds": round(time.perf_counter() - start, 2),
        },
    )


CASES = [
    ("llama", 8, 2, 128, None),
    ("llama", 8, 2, 64, 8),
    ("llama", 6, 2, 128, None),
    ("llama", 5, 5, 64, None),
    ("qwen2", 14, 7, 64, None),
    ("qwen2", 8, 1, 128, None),
    ("qwen3", 16, 4, 128, 4),
    ("qwen3", 9, 3, 64, None),
]
BLOCK_CASES = [
    ("mistral", 8, 2, 128, None),
    ("gpt_oss", 8, 2, 64, None),
    ("gemma2", 8, 2, 128, None),
]
"""Windows, sinks and softcap: alone in the attention, compared on the block."""


def declined(kernel: str, kind: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel does not take a case, or None."""
    _, _, special = MODELS[kind]
    like = torch.empty(0, dtype=dtype, device=device)
    case = kernels.Case.of(like, head_dim, "sliding_window" in special, "attn_logit_softcapping" in special)
    try:
        kernels.select(kernel, case)
    except ValueError as error:
        return str(error)
    return None


def report(record: Record) -> None:
    values = record.to_dict() | {"kernel": ",".join(record.extra["kernels"])}
    print(
        "{verdict} {kernel:>9} {scope} {model} {heads}/{kv_heads} d{head_dim} U{heads_per_stage}: worst {worst} {worst_error:.5f} "
        "(plain {worst_plain_error:.5f}), median {median_error:.5f} ({median_plain_error:.5f}), loss {loss_error:.1e} "
        "({loss_plain_error:.1e}), {seconds} s".format(verdict="PASS" if values["passed"] else "FAIL", **values),
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=["auto"], choices=["auto", *kernels.names()])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--cases", type=int, default=None, help="run only the first so many cases")
    parser.add_argument("--scopes", nargs="+", default=["block", "model"], choices=["block", "model", "repeat"])
    parser.add_argument("--repeats", type=int, default=20, help="of scope repeat, which looks for races (default: %(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--results", default="experiments/results", metavar="DIR", help="where parity.jsonl is (default: %(default)s)")
    parser.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        code(options.commit)
    except ConfigError as error:
        print(f"experiments.parity: error: {error}", file=sys.stderr)
        return 2

    upipe.init_distributed()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    lead = dist.get_rank() == 0
    gpus = dist.get_world_size() if device.type == "cuda" else 0
    command, run_id = command_line("experiments.parity", arguments), new_run_id()
    failed = 0
    for kernel, scope in itertools.product(options.kernels, options.scopes):
        if scope == "repeat":
            record = run_repeats(kernel, options.tokens, options.repeats, device)
            failed += not record.extra["passed"]
            if lead:
                report(record)
                records.append(record.updated({"run_id": run_id, **environment(command, options.commit, gpus=gpus)}), options.results)
            continue
        for kind, heads, kv_heads, head_dim, width in (CASES + BLOCK_CASES * (scope == "block"))[: options.cases]:
            reason = declined(kernel, kind, head_dim, getattr(torch, options.dtype), device)
            if reason is not None:
                if lead:
                    print(f"---- {scope} {kind}: {reason}", flush=True)
                continue
            record = run_case(
                kind, heads, kv_heads, head_dim, kernel, getattr(torch, options.dtype), scope, options.tokens,
                options.batches, options.layers, width, device,
            )
            failed += not record.extra["passed"]
            if lead:
                report(record)
                made_with = environment(command, options.commit, gpus=gpus)
                records.append(record.updated({"run_id": run_id, **made_with}), options.results)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
