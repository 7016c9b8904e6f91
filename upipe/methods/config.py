"""The `method` section of a configuration: how the ranks that share a sequence compute attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from upipe.config import Length
from upipe.methods.layouts import Chunked, Layout, Zigzag
from upipe.schedule import HeadSchedule

Name = Literal["upipe", "ulysses", "ring", "usp", "fpdt", "native", "none"]
NAMES: tuple[str, ...] = get_args(Name)
CHUNK_TOKENS, NODE = 65536, 8
"""Defaults, as the UPipe paper (arXiv 2602.21196) ran the baselines: tokens of a chunk of FPDT, Ulysses ranks of a node. What else its
methods had, all of them alike, is `memory.preset: paper`."""

FORMS = {
    "upipe": "this library's",
    "ulysses": "DeepSpeed's UlyssesSPAttentionHF around the attention kernel",
    "ring": "this library's zigzag ring around the attention kernel",
    "usp": "this library's Ulysses x zigzag ring, all heads at once, around the attention kernel",
    "fpdt": "this library's sequence-chunked, host-offloaded form of FPDT around the attention kernel; not DeepSpeed's layers",
    "native": "torch.distributed.tensor.experimental context_parallel, with torch's own attention kernels",
    "none": "the attention kernel alone, one rank a sequence",
}
"""Name -> what runs under it, for reports and records."""


@dataclass(frozen=True)
class MethodConfig:
    """How attention is shared. In a configuration also written as the name alone, `method: ring`.

    name: "upipe"; or a baseline, on the same model, data, loss, memory stack, rotation and kernel: "ulysses" (DeepSpeed's),
        "ring" (zigzag), "usp" (Ulysses x ring, all heads at once), "fpdt" (sequence chunks, the rest of them on the host),
        "native" (torch's context_parallel), "none" (no sharing). FORMS says what each is.
    ring_degree: R, ring ranks of usp, a divisor of `upipe.sp_size`, which is R x P; null: all but as many Ulysses ranks as
        sp_size has up to 8. A ring's is sp_size.
    chunk_tokens: the most tokens of the whole sequence in a chunk of fpdt, a multiple of sp_size.
    """

    name: Name = "upipe"
    ring_degree: int | None = None
    chunk_tokens: Length | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"name={self.name!r}: use one of {', '.join(NAMES)}")
        if self.ring_degree is not None and self.name not in ("ring", "usp"):
            hint = "set it in the upipe section" if self.name == "upipe" else "use name: usp for Ulysses x ring"
            raise ValueError(f"ring_degree={self.ring_degree} with name={self.name}: it is of ring and usp; leave it out, or {hint}")
        if self.chunk_tokens is not None and self.name != "fpdt":
            raise ValueError(f"chunk_tokens={self.chunk_tokens} with name={self.name}: only fpdt has chunks; leave it out")
        for field in ("ring_degree", "chunk_tokens"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field}={value!r} must be a positive integer")

    @classmethod
    def section(cls, value: Any) -> Any:
        """`method: ring` as the section it stands for; `config.convert` asks."""
        return {"name": value} if isinstance(value, str) else value

    def degrees(self, sp_size: int) -> tuple[int, int]:
        """(R, P) of so many ranks that share a sequence. Raises ValueError, naming what works."""
        works = [n for n in range(1, sp_size + 1) if sp_size % n == 0]
        if self.name == "none" and sp_size > 1:
            raise ValueError(f"method=none shares no sequence, sp_size={sp_size}: use sp_size=1, or method {', '.join(NAMES[:-1])}")
        if self.name == "ring" and self.ring_degree not in (None, sp_size):
            raise ValueError(
                f"method=ring with ring_degree={self.ring_degree} and sp_size={sp_size}: its ring is all of them; use "
                f"ring_degree={sp_size}, or method=usp"
            )
        if self.name in ("ring", "native"):
            return sp_size, 1
        if self.name != "usp":
            return 1, sp_size
        ring = sp_size // max(n for n in works if n <= NODE) if self.ring_degree is None else self.ring_degree
        if sp_size % ring:
            raise ValueError(f"ring_degree={ring} does not divide sp_size={sp_size}: use one of {', '.join(map(str, works))}")
        return ring, sp_size // ring

    def layout(self, sp_size: int) -> Layout:
        """Which tokens each rank holds. Raises ValueError, naming what works."""
        ring, ulysses = self.degrees(sp_size)
        if self.name == "fpdt":
            chunk = CHUNK_TOKENS if self.chunk_tokens is None else self.chunk_tokens
            if chunk % sp_size:
                near = max(sp_size, chunk // sp_size * sp_size)
                raise ValueError(f"chunk_tokens={chunk} is not a multiple of sp_size={sp_size}: use {near}")
            return Chunked(sp_size, chunk)
        return Zigzag(ring, ulysses)


def of(method: MethodConfig | str) -> MethodConfig:
    """Settings from a name; settings as they are. Raises ValueError."""
    if not isinstance(method, (str, MethodConfig)):
        raise ValueError(f"{method!r}: give one of {', '.join(NAMES)}, or upipe.methods.MethodConfig(...)")
    return MethodConfig(method) if isinstance(method, str) else method


def name_in(mapping: dict[str, Any]) -> Any:
    """The method's name in a configuration's mapping."""
    section = MethodConfig.section(mapping.get("method", {}))
    return section.get("name", "upipe") if isinstance(section, dict) else None


def host_bytes(method: MethodConfig, tokens: int, rows: int, ranks: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that one attention call keeps on the host at most, of the rank with the most: fpdt's q, k, v, result and gradient,
    log-sum-exp, and dq in fp32 of all chunks but the first, whose own is done before it is kept.

    Args:
        tokens: of the whole sequence. rows: sequences. ranks: sp_size. heads, kv_heads: H and K of all ranks.
    """
    if method.name != "fpdt":
        return 0
    layout = method.layout(ranks)
    chunks = layout.chunks(tokens)
    (shares, *_) = HeadSchedule(heads, kv_heads, ranks, -(-heads // ranks) * ranks).table
    h, n = (max(len(part) for part in parts) for parts in zip(*((share.q_heads, share.kv_arriving) for share in shares)))
    a_token = head_dim * itemsize * (3 * h + 2 * n) + 4 * h
    kept = rows * layout.padded(tokens)
    return kept * a_token + kept // chunks * (chunks - 1) * h * head_dim * 4


def check(method: MethodConfig, upipe: Any, memory: Any) -> None:
    """Refuse settings that do not go together, before anything is built.

    Args:
        upipe, memory: those sections.

    Raises:
        ValueError: naming the values and what would work.
    """
    if upipe.sp_size >= 1:
        method.layout(upipe.sp_size)
    check_stages(method, upipe)
    if memory.fused_layers and method.name != "upipe":
        raise ValueError(f"memory.fused_layers=true with method={method.name}: a fused layer is of method=upipe; set it to false")


def check_stages(method: MethodConfig, upipe: Any) -> None:
    """Refuse settings of UPipe's stages under another method. Raises ValueError."""
    if method.name == "upipe":
        return
    default = type(upipe)()
    for field in ("heads_per_stage", "attention_output", "attention_output_layers", "overlap", "dx"):
        value, plain = getattr(upipe, field), getattr(default, field)
        if value != plain:
            raise ValueError(
                f"upipe.{field}={value} with method={method.name}: only method=upipe walks heads in stages; leave it out "
                f"(it is {plain}), or use method: upipe"
            )
    for field in ("kernel_block_tokens", "kernel_block_tokens_backward") if method.name == "native" else ():
        value = getattr(upipe, field)
        if isinstance(value, int):
            raise ValueError(f"upipe.{field}={value} with method=native: torch calls its kernels itself; leave it out or use another")
    if upipe.ring_degree != 1:
        raise ValueError(
            f"upipe.ring_degree={upipe.ring_degree} with method={method.name}: it is of method=upipe; leave it out, or use "
            "method: {name: usp, ring_degree: ...}"
        )
