"""What `experiments.block` compares: one attention block by each method, run as a checkpointed layer runs it.

A step is a forward without gradients whose result is dropped, a forward again, and a backward from a given output
gradient; as with a residual connection, the second result is gone before the backward starts.

Symbols: S tokens, P ranks, L = S/P local tokens, H query heads, K kv heads, D hidden size, d head dim, U heads a stage.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import upipe
from experiments.live import After
from upipe import kernels
from upipe.block import checkpoint_contexts
from upipe.config import ConfigError
from upipe.methods.core import local_attention
from upipe.methods.ulysses import ulysses
from upipe.presets import preset_shapes
from upipe.schedule import HeadSchedule, RankStage

PRESETS = {"llama3_8b": "llama3-8b", "qwen3_32b": "qwen3-32b", "toy": "qwen3-toy"}
"""--model -> what records call it. The toy has q/k norms and H*d = 2D, as Qwen3-32B's is not D either."""
TOY = preset_shapes()["qwen3-32b"] | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
BOUNDS = {torch.bfloat16: (2e-2, 5e-2), torch.float32: (1e-4, 1e-4)}
"""Relative errors that `check` allows: of y and dx, of the weights' gradients."""


@dataclass(frozen=True)
class Mode:
    """A setting of UPipe's block, written `device`, `host:overlap=off`, `device:U=8,dx=bf16`. Fields as in `UPipeConfig`."""

    attention_output: str = "device"
    overlap: bool = True
    dx: str = "gemm"
    heads_per_stage: int | None = None

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Raises ConfigError, naming what is not understood."""
        output, _, rest = text.partition(":")
        values: dict[str, Any] = {"attention_output": output}
        for item in filter(None, rest.split(",")):
            name, _, value = item.partition("=")
            if name == "overlap" and value in ("on", "off"):
                values["overlap"] = value == "on"
            elif name == "dx" and value in ("gemm", "bf16"):
                values["dx"] = value
            elif name == "U" and value.isdecimal():
                values["heads_per_stage"] = int(value)
            else:
                raise ConfigError(f"mode {text!r}: {item!r} is none of overlap=on|off, dx=gemm|bf16, U=HEADS")
        if output not in ("device", "host"):
            raise ConfigError(f"mode {text!r} starts with {output!r}: device or host, where the attention output is kept")
        return cls(**values)

    def __str__(self) -> str:
        changed = [f"U={self.heads_per_stage}"] * (self.heads_per_stage is not None)
        changed += ["overlap=off"] * (not self.overlap) + [f"dx={self.dx}"] * (self.dx != "gemm")
        return self.attention_output + (":" + ",".join(changed) if changed else "")


@dataclass
class Inputs:
    """What a block is given on one rank: x [1, L, D], a leaf that requires gradients, and the gradient of its output, alike;
    cos, sin [1, L, d] and positions [1, L] of its tokens."""

    tokens: int
    x: torch.Tensor
    grad: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.x, self.grad, self.cos, self.sin, self.positions))


class Block:
    """The plain attention module that every method starts from, with random weights, the same on every rank.

    Methods work on copies of the one-layer model around it that share its parameters.
    """

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        shape = TOY if model == "toy" else preset_shapes()[PRESETS[model]]
        shape = shape | {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64}
        config = AutoConfig.for_model(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None, use_cache=False)
        self.name, self.dtype, self.device, self.seed = PRESETS[model], dtype, device, seed
        self.P, self.rank = dist.get_world_size(), dist.get_rank()
        self.H, self.K = config.num_attention_heads, config.num_key_value_heads
        self.D, self.d = config.hidden_size, config.head_dim
        self.own_heads = len(self.shares[self.rank].q_heads)
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for name, parameter in self.model.named_parameters():
            # Distinct norm weights, all ones otherwise; and what a bf16 model can hold, in fp32 too.
            noise = 0.2 * torch.randn_like(parameter) if "norm" in name else 0.0
            parameter.data = (parameter.data + noise).bfloat16().to(dtype)
        self.model.to(device)

    def attention(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        return (self.model if model is None else model).model.layers[0].self_attn

    @property
    def shares(self) -> tuple[RankStage, ...]:
        """The heads of each rank, all in one stage."""
        return HeadSchedule(self.H, self.K, self.P, -(-self.H // self.P) * self.P).table[0]

    def copy(self) -> torch.nn.Module:
        """The model again, with the same parameters."""
        return copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})

    @property
    def weights_nbytes(self) -> int:
        return sum(p.nbytes for p in self.attention().parameters())

    def inputs(self, tokens: int) -> Inputs:
        """Random x and output gradient of `tokens` over all ranks, normally distributed."""
        self.check_tokens(tokens)
        L = tokens // self.P
        generator = torch.Generator(self.device).manual_seed(self.seed + 1009 * self.rank + 1)
        options = {"generator": generator, "dtype": self.dtype, "device": self.device}
        x, grad = (torch.randn(1, L, self.D, **options) for _ in range(2))
        positions = torch.arange(self.rank * L, self.rank * L + L, device=self.device)[None]
        cos, sin = self.model.model.rotary_emb(x, positions)
        return Inputs(tokens, x.requires_grad_(), grad, cos, sin, positions)

    def check_tokens(self, tokens: int) -> None:
        """Raises ConfigError where the ranks' shards would not be alike."""
        if tokens % self.P:
            raise ConfigError(f"tokens={tokens} on {self.P} ranks: use a multiple of {self.P}")

    def forget_gradients(self, inputs: Inputs) -> None:
        inputs.x.grad = None
        for parameter in self.model.parameters():
            parameter.grad = None


def nothing(*_: Any) -> None:
    """What a step does between its parts unless told otherwise."""


def checkpointed(block, inputs: Inputs, contexts: Callable, mark: Callable = nothing, keep: Callable = nothing) -> None:
    """One step of `block(inputs) -> y [1, L, D]`; gradients end in the leaves.

    Args:
        contexts: -> two context managers, for the first forward and for the second.
        mark: called after each of the three parts.
        keep: called with the result of each forward.
    """
    first, again = contexts()
    with torch.no_grad(), first:
        keep(block(inputs))
    mark()
    with again:
        y = block(inputs)
    keep(y)
    end = After.apply(y, inputs.grad)
    del y
    mark()
    end.backward()
    mark()


@dataclass
class Method:
    """One of the methods; subclasses say what a step is.

    forwards: attention forwards in a step. heads_per_stage: U that runs, None where heads are not walked in groups.
    """

    block: Block
    kernel: kernels.Kernel
    mode: Mode | None = None
    name: str = field(default="", init=False)
    forwards: int = field(default=2, init=False)
    heads_per_stage: int | None = field(default=None, init=False)

    @property
    def label(self) -> str:
        return self.name if self.mode is None else f"{self.name} {self.mode}"

    def prepare(self, inputs: Inputs) -> None:
        """What a step needs besides the inputs; not timed."""

    def step(self, inputs: Inputs, mark: Callable = nothing, keep: Callable = nothing) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Drop what `prepare` made."""

    def close(self) -> None:
        """Undo what making the method changed outside of it."""


class Ulysses(Method):
    """DeepSpeed's UlyssesSPAttentionHF around the kernel, on the Hugging Face module: its projections and rotation.

    With one rank DeepSpeed's entry does nothing, so there the kernel stands in the plain module; records call that method
    "none".
    """

    def __init__(self, block: Block, kernel: kernels.Kernel) -> None:
        super().__init__(block, kernel)
        self.name = "ulysses" if block.P > 1 else "none"
        self.implementation = f"block_{self.name}_{kernel.name}"

        def core(module, q, k, v, attention_mask, scaling, **kwargs):
            return local_attention(*(t.transpose(1, 2) for t in (q, k, v)), kernel, scaling), None

        core = ulysses(core, dist.group.WORLD, 1, block.H, block.K, block.d, 1)
        ALL_ATTENTION_FUNCTIONS[self.implementation] = core
        model = block.copy()
        model.config._attn_implementation = self.implementation
        self.attention = block.attention(model)

    def step(self, inputs, mark=nothing, keep=nothing):
        checkpointed(lambda i: _attend(self.attention, i), inputs, lambda: (nullcontext(), nullcontext()), mark, keep)

    def close(self):
        del ALL_ATTENTION_FUNCTIONS[self.implementation]


class UPipe(Method):
    """`upipe.apply` on the Hugging Face module."""

    def __init__(self, block: Block, kernel: kernels.Kernel, mode: Mode) -> None:
        super().__init__(block, kernel, mode)
        self.name = "upipe"
        self.forwards = 1 if mode.attention_output == "host" else 2
        config = upipe.UPipeConfig(
            sp_size=block.P, heads_per_stage=mode.heads_per_stage, kernel=kernel.name,
            attention_output=mode.attention_output, overlap=mode.overlap, dx=mode.dx,
        )
        model = block.copy()
        self.handle = upipe.apply(model, config)
        self.attention = block.attention(model)
        (schedule,) = self.handle._sharding.schedules.values()
        self.heads_per_stage = schedule.heads_per_stage

    def step(self, inputs, mark=nothing, keep=nothing):
        checkpointed(lambda i: _attend(self.attention, i), inputs, checkpoint_contexts, mark, keep)
        ran = set(self.handle.kernels.values())
        if ran != {self.kernel.name}:
            raise AssertionError(f"{self.label}: kernel {self.kernel.name} was asked for, {sorted(ran)} ran")

    def close(self):
        self.handle.remove()


def _attend(attention, inputs: Inputs) -> torch.Tensor:
    y, _ = attention(
        hidden_states=inputs.x, position_embeddings=(inputs.cos, inputs.sin), attention_mask=None, position_ids=inputs.positions
    )
    return y


class BareKernel(Method):
    """Kernel calls alone, of the FLOPs that this rank's share has: its heads over the whole sequence, in one call.

    Two forwards and a backward, or with `host` one and one. q, k, v and the output's gradient are random.
    """

    def __init__(self, block: Block, kernel: kernels.Kernel, attention_output: str) -> None:
        super().__init__(block, kernel, Mode(attention_output))
        self.name = "kernel"
        self.forwards = 1 if attention_output == "host" else 2
        whole = block.shares[block.rank]
        self.calls = [
            (slice(c.q_first - whole.q_heads.start, c.q_first - whole.q_heads.start + c.q_count),
             slice(c.kv_first - whole.kv_arriving.start, c.kv_first - whole.kv_arriving.start + c.kv_count))
            for c in whole.calls
        ]
        self.heads, self.kv_heads = len(whole.q_heads), len(whole.kv_arriving)
        self.tensors: tuple[torch.Tensor, ...] = ()

    def prepare(self, inputs):
        generator = torch.Generator(self.block.device).manual_seed(self.block.seed + 1)
        options = {"generator": generator, "dtype": self.block.dtype, "device": self.block.device}
        heads = (self.heads, self.heads, self.kv_heads, self.kv_heads)
        self.tensors = tuple(torch.randn(1, inputs.tokens, n, self.block.d, **options) for n in heads)

    def step(self, inputs, mark=nothing, keep=nothing):
        grad, q, k, v = self.tensors
        scale = self.block.d**-0.5
        done = []
        for _ in range(self.forwards):
            done.clear()
            done += [self.kernel.forward(q[:, :, a], k[:, :, b], v[:, :, b], scale) for a, b in self.calls]
            mark()
        if self.forwards == 1:
            mark()
        for (a, b), (out, lse) in zip(self.calls, done):
            self.kernel.backward(grad[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], out, lse, scale)
        mark()

    def release(self):
        self.tensors = ()


@contextmanager
def made(block: Block, kernel: kernels.Kernel, names: list[str], modes: list[Mode]):
    """The methods for one kernel: of `kernel` one for each count of forwards that the others run."""
    methods: list[Method] = []
    try:
        if "ulysses" in names:
            methods.append(Ulysses(block, kernel))
        if "upipe" in names:
            methods += [UPipe(block, kernel, mode) for mode in modes]
        if "kernel" in names:
            counts = {m.forwards for m in methods} or {1 if mode.attention_output == "host" else 2 for mode in modes}
            methods += [BareKernel(block, kernel, output) for output, n in (("device", 2), ("host", 1)) if n in counts]
        yield methods
    except RuntimeError:
        # Memory ran out or a collective failed, maybe here alone: giving groups back would wait for the other ranks.
        methods.clear()
        raise
    finally:
        for method in methods:
            method.close()


@contextmanager
def counted(kernel: kernels.Kernel):
    """Counts query heads that the kernel runs forward and backward meanwhile: a dict of the two."""
    heads = {"forward": 0, "backward": 0}

    def forward(q, *args, **kwargs):
        heads["forward"] += q.shape[2]
        return type(kernel).forward(kernel, q, *args, **kwargs)

    def backward(grad, q, *args, **kwargs):
        heads["backward"] += q.shape[2]
        return type(kernel).backward(kernel, grad, q, *args, **kwargs)

    kernel.forward, kernel.backward = forward, backward
    try:
        yield heads
    finally:
        del kernel.forward, kernel.backward


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """norm(got - want) / norm(want)."""
    return (torch.linalg.vector_norm(got.float() - want.float()) / torch.linalg.vector_norm(want.float())).item()


def check(block: Block, methods: list[Method], tokens: int) -> dict[str, dict[str, float]]:
    """Compare every method but the bare kernel with the plain module on the unsharded sequence in fp32.

    Returns:
        label -> relative errors of y (of both forwards), dx and the weights' gradients; collective.

    Raises:
        AssertionError: an error is above `BOUNDS`, a method wrote into its inputs, or it ran attention another number of times
            than it says.
    """
    inputs = block.inputs(tokens)
    before = inputs.x.detach().clone(), inputs.grad.clone()
    truth = _truth(block, inputs)
    errors = {}
    for method in methods:
        if method.name == "kernel":
            continue
        block.forget_gradients(inputs)
        results: list[torch.Tensor] = []
        with counted(method.kernel) as heads:
            method.step(inputs, keep=lambda y, into=results: into.append(y.detach().clone()))
        if heads != {"forward": method.forwards * block.own_heads, "backward": block.own_heads}:
            raise AssertionError(
                f"{method.label} ({method.kernel.name}) ran {heads} heads of the {block.own_heads} that this rank has; "
                f"{method.forwards} forwards and a backward of each were to run"
            )
        got = {"y": results[1], "y_first": results[0], "dx": inputs.x.grad}
        got = {name: _gather(tensor.float()) for name, tensor in got.items()}
        for name, parameter in block.attention().named_parameters():
            got[name] = parameter.grad.float().clone()
            dist.all_reduce(got[name])
        found = errors[method.label] = {name: relative_error(tensor, truth[name]) for name, tensor in got.items()}
        tight, loose = BOUNDS[block.dtype]
        wrong = {n: e for n, e in found.items() if not e <= (tight if n in ("y", "y_first", "dx") else loose)}
        if wrong:
            raise AssertionError(
                f"{method.label} ({method.kernel.name}) at {tokens} tokens: relative errors {wrong} are above {tight} (y, dx) "
                f"or {loose} (weights)"
            )
        if not (torch.equal(inputs.x.detach(), before[0]) and torch.equal(inputs.grad, before[1])):
            raise AssertionError(f"{method.label} ({method.kernel.name}) wrote into its input or into the gradient it was given")
    block.forget_gradients(inputs)
    return errors


def _truth(block: Block, inputs: Inputs) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(block.model)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    attention = block.attention(model)
    x, grad = (_gather(t.detach().float()) for t in (inputs.x, inputs.grad))
    angles = tuple(_gather(t.float()) for t in (inputs.cos, inputs.sin))
    x.requires_grad_()
    y, _ = attention(hidden_states=x, position_embeddings=angles, attention_mask=None)
    y.backward(grad)
    grads = {name: p.grad for name, p in attention.named_parameters()}
    return {"y": y.detach(), "y_first": y.detach(), "dx": x.grad, **grads}


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """[1, L, c] of every rank -> [1, S, c]."""
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, tensor.contiguous())
    return torch.cat(shards, dim=1)


def attention_flops(tokens: int, head_dim: int, heads: int, forwards: int) -> float:
    """Floating-point operations of causal attention in a step: a forward is 2*S^2*d a head, a backward 2.5 times that."""
    return (forwards + 2.5) * 2 * math.pow(tokens, 2) * head_dim * heads
