"""From global batches to this rank's shards, with the number of valid tokens of the accumulation window attached.

Every rank of a sequence-parallel group iterates the same global batches (ranks of different data-parallel index
iterate different ones); the loader takes each rank's tokens. Shapes: B batch, S tokens, L of a rank (`zigzag.local_length`).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from upipe import zigzag
from upipe.comm import SequenceParallelGroups
from upipe.loss import IGNORE
from upipe.preflight import PreflightError

logger = logging.getLogger(__name__)
KEYS = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")


def prepare_batch(batch: dict) -> dict[str, torch.Tensor]:
    """Give a global batch explicit positions and shifted labels, and check what cannot be exact.

    Args:
        batch: input_ids [B, S]; labels [B, S], the tokens themselves or -100, or shift_labels, already shifted (these
            win); optional position_ids [B, S] or [1, S], which restart where a packed document begins; optional
            attention_mask [B, S], ones with zeros to their right.

    Returns:
        input_ids, position_ids, shift_labels, all [B, S] int64.

    Raises:
        PreflightError: naming the key, shape or row.
    """
    if not isinstance(batch, Mapping):
        raise PreflightError(f"a batch is a {type(batch).__name__}: it must be a dict of tensors with input_ids and labels")
    given = {key: value for key, value in batch.items() if value is not None}
    unknown = sorted(set(given) - set(KEYS))
    if unknown:
        raise PreflightError(
            f"batch keys {unknown} are not known: give {', '.join(KEYS)}; packed documents are read from position_ids that restart"
        )
    if "input_ids" not in given or not ("labels" in given or "shift_labels" in given):
        raise PreflightError(f"a batch needs input_ids and labels (or shift_labels); it has {sorted(given)}")
    shaped = {key: _tensor(key, value) for key, value in given.items()}
    ids = shaped["input_ids"]
    if ids.dim() != 2 or ids.numel() == 0:
        raise PreflightError(f"input_ids has shape {tuple(ids.shape)}: it must be [batch, tokens] with at least one row and token")
    for key, value in shaped.items():
        if value.shape != ids.shape and not (key == "position_ids" and value.shape in ((1, ids.shape[1]), (ids.shape[1],))):
            raise PreflightError(f"{key} has shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}: they must agree")
    if "shift_labels" in shaped:
        targets = shaped["shift_labels"]
    else:
        targets = torch.nn.functional.pad(shaped["labels"][:, 1:], (0, 1), value=IGNORE)
    if "position_ids" in shaped:
        positions = shaped["position_ids"].expand_as(ids)
    else:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if "attention_mask" in shaped:
        _check_mask(shaped["attention_mask"], targets)
    return {"input_ids": ids, "position_ids": positions, "shift_labels": targets}


def _tensor(key: str, value) -> torch.Tensor:
    """The value as int64; a mask may be of any type."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PreflightError(f"{key} is no tensor: {error}") from None
    if key == "attention_mask":
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        raise PreflightError(f"{key} is {str(tensor.dtype).removeprefix('torch.')}: it must be whole numbers")
    return tensor.long()


def check_vocabulary(batch: dict[str, torch.Tensor], vocabulary: int) -> None:
    """Token ids and labels (-100 apart) are below the vocabulary, or the rank that has them would fail by itself."""
    for key in ("input_ids", "shift_labels"):
        value = batch[key]
        wrong = ((value < 0) | (value >= vocabulary)) & ~((value == IGNORE) & (key == "shift_labels"))
        if wrong.any():
            row, place = wrong.nonzero()[0].tolist()
            raise PreflightError(
                f"{key} row {row} has {int(value[row, place])} at token {place}: the vocabulary is 0 to {vocabulary - 1}"
                + (" (and -100, ignored)" if key == "shift_labels" else "")
            )


def _check_mask(mask: torch.Tensor, targets: torch.Tensor) -> None:
    mask = mask.bool()
    ragged = (mask[:, 1:] & ~mask[:, :-1]).any(1)
    if ragged.any():
        row = int(ragged.nonzero()[0])
        raise PreflightError(
            f"attention_mask row {row} has padding before a token: only padding on the right is exact under causal attention. "
            "Move it to the right, or pack documents with position_ids that restart"
        )
    counted = (~mask & (targets != IGNORE)).any(1)
    if counted.any():
        row = int(counted.nonzero()[0])
        raise PreflightError(f"row {row} has labels on padding (attention_mask 0): set labels to -100 there")


def padded(batch: dict[str, torch.Tensor], extra: int) -> dict[str, torch.Tensor]:
    """A prepared batch with so many more tokens at the end of each row: token 0, label -100, positions that go on."""
    if not extra:
        return batch
    longer = {}
    for key, value in batch.items():
        if key == "position_ids":
            more = torch.arange(1, extra + 1, device=value.device)
            longer[key] = torch.cat((value, value[:, -1:] + more), dim=1)
        else:
            longer[key] = torch.nn.functional.pad(value, (0, extra), value=IGNORE if key == "shift_labels" else 0)
    return longer


def cut(batch: dict[str, torch.Tensor], parts: Sequence[range]) -> dict[str, torch.Tensor]:
    """[B, L] of a padded batch: the tokens at these positions, in this order."""
    return {key: torch.cat([value[:, p.start : p.stop] for p in parts], dim=1).contiguous() for key, value in batch.items()}


def shard_batch(batch: dict[str, torch.Tensor], sp_size: int, sp_rank: int, ring_degree: int = 1) -> dict[str, torch.Tensor]:
    """This rank's [B, L] of a prepared batch, padded (`padded`), as `zigzag.shards` has them."""
    S, ulysses = batch["input_ids"].shape[1], sp_size // ring_degree
    whole = padded(batch, zigzag.padding(S, ring_degree, ulysses))
    return cut(whole, zigzag.shards(S, ring_degree, ulysses, *divmod(sp_rank, ulysses)))


def check_usable(groups: SequenceParallelGroups) -> None:
    """That ranks still can exchange. Raises PreflightError where the handle was removed, or a step was left half way."""
    if groups.closed:
        raise PreflightError("this handle was removed: call upipe.apply again")
    if groups.failure is not None:
        raise PreflightError(groups.failure)


class ShardedLoader:
    """Iterates a loader of global batches, yielding this rank's shards. Made by `handle.shard(...)`.

    It reads one accumulation window ahead and exchanges, once a window, how many valid tokens each rank has and a
    checksum of its batches. Each yielded batch has input_ids, position_ids, shift_labels [B, L] on `device`,
    num_valid (0-d int64: valid tokens of the window over all ranks), accumulation, sp_size and ring_degree (int), and chunk (int or
    None). Iteration ends on every rank when one of them has no whole window left; what is left over is dropped with a warning.

    Args:
        cut: this rank's shard of a prepared batch, called as `shard_batch`.
        chunk: tokens of a chunk, where that cuts chunks (`methods.layouts.Chunked`).

    Raises:
        PreflightError: ranks of a sequence-parallel group were given different batches, or a batch is refused.
    """

    def __init__(
        self, loader: Iterable[dict], groups: SequenceParallelGroups, device: torch.device, accumulation: int = 1,
        vocabulary: int | None = None, cut: Callable[[dict[str, torch.Tensor], int, int, int], dict[str, torch.Tensor]] = shard_batch,
        chunk: int | None = None,
    ) -> None:
        if not isinstance(accumulation, int) or accumulation < 1:
            raise PreflightError(f"accumulation={accumulation!r} must be a positive integer")
        self.loader, self.groups, self.device, self.accumulation = loader, groups, device, accumulation
        self.vocabulary, self.cut, self.chunk = vocabulary, cut, chunk

    def __len__(self) -> int:
        return len(self.loader) // self.accumulation * self.accumulation

    def __iter__(self) -> Iterator[dict]:
        source = iter(self.loader)
        while True:
            check_usable(self.groups)
            window, problem = [], None
            # Whatever goes wrong here goes wrong on one rank: the others must be told, or they wait for it.
            try:
                for batch in islice(source, self.accumulation):
                    window.append(prepare_batch(batch))
                    if self.vocabulary is not None:
                        check_vocabulary(window[-1], self.vocabulary)
            except Exception as error:
                problem = error
            whole = len(window) == self.accumulation
            counts = self._exchange(window, whole, problem)
            if problem is not None:
                raise problem
            if counts is None:
                if window:
                    logger.warning("dropped %d micro-batches: no whole window of %d is left", len(window), self.accumulation)
                return
            num_valid = torch.tensor(counts, device=self.device)
            for batch in window:
                local = self.cut(batch, self.groups.sp_size, self.groups.sp_rank, self.groups.ring_size)
                local = {key: value.to(self.device, non_blocking=True) for key, value in local.items()}
                yield {
                    **local, "num_valid": num_valid, "accumulation": self.accumulation, "sp_size": self.groups.sp_size,
                    "ring_degree": self.groups.ring_size, "chunk": self.chunk,
                }

    def _exchange(self, window: list[dict], whole: bool, problem: Exception | None) -> int | None:
        """-> valid tokens of the window over all ranks, or None where a rank is at its end."""
        valid = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in window)
        checksum = 0
        for batch in window:
            for value in batch.values():
                checksum = zlib.crc32(value.cpu().contiguous().numpy(), checksum)
            checksum = zlib.crc32(repr(tuple(batch["input_ids"].shape)).encode(), checksum)
        mine = torch.tensor([1 if problem else 0, int(whole), valid, checksum], device=self.device)
        every = torch.empty(self.groups.world_size, 4, dtype=torch.long, device=self.device)
        dist.all_gather_into_tensor(every.view(-1), mine)
        rows = every.tolist()
        broken = [rank for rank, row in enumerate(rows) if row[0]]
        if broken and problem is None:
            raise PreflightError(f"rank {broken[0]} has no batch to give: it was refused or could not be read; its own message says why")
        if broken:
            return None
        P = self.groups.sp_size
        teams = [rows[d * P : (d + 1) * P] for d in range(self.groups.dp_size)]
        for d, team in enumerate(teams):
            if any(row != team[0] for row in team):
                raise PreflightError(
                    f"ranks {d * P} to {d * P + P - 1} form one sequence-parallel group but were given different batches: every rank "
                    "of a group must iterate the same ones (shuffle and sample by handle.dp_rank of handle.dp_size). For a loader "
                    "that gives each rank its own sample use handle.shard(handle.adapt(loader))"
                )
        if not all(row[1] for row in rows):
            return None
        sums = [team[0][3] for team in teams]
        if len(teams) > 1 and len(set(sums)) == 1:
            logger.warning("all %d data-parallel groups were given the same batches: sample by handle.dp_rank", len(teams))
        return sum(team[0][2] for team in teams)


class AdaptedLoader:
    """Turns a loader that gives every rank its own batches (the contract of DeepSpeed's UlyssesSPDataLoaderAdapter)
    into one that gives a sequence-parallel group the same batches: P of them, one from each rank, for each of its own.

    Made by `handle.adapt(loader)`; hand it to `handle.shard`. Ranks must have equally many batches.
    """

    def __init__(self, loader: Iterable[dict], groups: SequenceParallelGroups) -> None:
        self.loader, self.groups = loader, groups

    def __len__(self) -> int:
        return len(self.loader) * self.groups.sp_size

    def __iter__(self) -> Iterator[dict]:
        source = iter(self.loader)
        while True:
            try:
                mine, problem = next(source, None), None
            except Exception as error:
                mine, problem = None, error
            every: list = [None] * self.groups.sp_size
            dist.all_gather_object(every, (mine, problem is not None), group=self.groups.sp_group)
            broken = [rank for rank, (_, failed) in enumerate(every) if failed]
            if problem is not None:
                raise problem
            if broken:
                raise PreflightError(f"rank {broken[0]} of the group could not read its batch; its own message says why")
            every = [batch for batch, _ in every]
            if any(batch is None for batch in every):
                left = sum(batch is not None for batch in every)
                if left:
                    logger.warning("dropped %d batches: the ranks of a group have unequally many", left)
                return
            yield from every
