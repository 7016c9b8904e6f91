"""Real ranks for tests: processes that share a gloo world, started once and used by many cases.

    world = World(4)
    results = world.run(function, key=value)      # list of function(key=value), one a rank

`function` must be importable (module level); it runs on every rank with the process group
initialised. A failure on any rank raises `RankFailure` with that rank's traceback, a hang
raises `RankTimeout` with every rank's stack. Either ends the processes, so the next case
starts in a fresh world: a failed case cannot poison a later one.

Processes are forked from a server that has imported torch, transformers and DeepSpeed once;
a world costs about a second. Gloo's threads of a process group wake a hundred times a second for as long as
anything holds the group, destroyed or not, and most cases leave some behind: `retire` ends a world of too many, so that they do not
take the machine from those that follow.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from multiprocessing import connection

import psutil

PRELOAD = ["torch", "transformers", "transformers.models.llama.modeling_llama",
           "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3",
           "deepspeed", "deepspeed.runtime.sequence_parallel.ulysses_sp"]
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
               "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
GRACE_S = 3.0         # for the other ranks, once one has failed
START_S = 120.0       # for a world to start, imports included
MOST_THREADS = 200    # of a rank, three a process group: with 800 a case takes half as long again


class RankFailure(AssertionError):
    """A rank raised or died; the message has its traceback and the tail of its output."""


class RankTimeout(AssertionError):
    """The ranks did not answer in time; the message has the stack of each."""


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank_main(rank, size, port, pipe, log_path):
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                      LOCAL_WORLD_SIZE=str(size), LOCAL_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    try:
        import torch
        torch.set_num_threads(1)
        import deepspeed
        deepspeed.utils.logging.set_log_level_from_string("error")
        from upipe.comm import init_distributed
        init_distributed()
        pipe.send_bytes(pickle.dumps((True, rank)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            function, kwargs = pickle.loads(request)
            answer = (True, function(**kwargs))
            message = pickle.dumps(answer)
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(message)
        pipe.send_bytes(pickle.dumps(psutil.Process().num_threads()))


class World:
    """`size` ranks on gloo. Starts at the first `run`, and again after a failure."""

    def __init__(self, size):
        self.size = size
        self._ranks = []
        self._folder = None
        self.threads = 0

    def run(self, function, timeout=120.0, **kwargs):
        """`function(**kwargs)` on every rank; returns the list of results in rank order."""
        if not self._ranks:
            self._start()
        request = pickle.dumps((function, kwargs))
        for _, pipe in self._ranks:
            pipe.send_bytes(request)
        results = self._collect(timeout, f"{function.__module__}.{function.__qualname__}")
        self.threads = max(pickle.loads(pipe.recv_bytes()) for _, pipe in self._ranks)
        return results

    def retire(self):
        """End the processes if they have more threads than `MOST_THREADS`."""
        if self.threads > MOST_THREADS:
            self.close()

    def _start(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix=f"world{self.size}-")
        port = _free_port()
        before = {key: os.environ.get(key) for key in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)        # the server of forks takes its environment at its first start
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank_main, daemon=True,
                                          args=(rank, self.size, port, theirs, self._log(rank)))
                process.start()
                theirs.close()
                self._ranks.append((process, ours))
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
        self._collect(START_S, "the start of the world")

    def _log(self, rank):
        return os.path.join(self._folder.name, f"rank{rank}.log")

    def _tail(self, rank, characters=3000):
        try:
            with open(self._log(rank), errors="replace") as f:
                return f.read()[-characters:]
        except OSError:
            return ""

    def _collect(self, timeout, what):
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        results, failures = [None] * self.size, {}
        while waiting:
            left = deadline - time.monotonic()
            ready = connection.wait(list(waiting), timeout=max(0.0, left))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    process = self._ranks[rank][0]
                    process.join(1.0)
                    good, value = False, f"the process died, exit code {process.exitcode}\n{self._tail(rank)}"
                if good:
                    results[rank] = value
                else:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    failures[rank] = value
        if failures:
            self.close()
            texts = {}
            for rank, text in sorted(failures.items()):
                texts.setdefault(text, []).append(rank)
            told = "\n".join(f"rank {', '.join(map(str, ranks))}:\n{text}" for text, ranks in texts.items())
            raise RankFailure(f"{what}: ranks {sorted(failures)} of {self.size} failed\n{told}")
        if waiting:
            stacks = self._stacks(waiting.values())
            self.close()
            raise RankTimeout(f"{what}: ranks {sorted(waiting.values())} of {self.size} gave no answer in "
                              f"{timeout:.0f} s\n{stacks}")
        return results

    def _stacks(self, ranks):
        texts = []
        for rank in sorted(ranks):
            mark = len(self._tail(rank, 10**9))
            try:
                os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
            except ProcessLookupError:
                continue
            time.sleep(0.3)
            texts.append(f"rank {rank}:\n{self._tail(rank, 10**9)[mark:][-4000:]}")
        return "\n".join(texts)

    def close(self):
        """End the processes; the next `run` starts new ones."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join(10.0)
        self._ranks, self.threads = [], 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Worlds:
    """Worlds by size, each started once: `worlds(4).run(...)`."""

    def __init__(self):
        self._by_size = {}

    def __call__(self, size):
        if size not in self._by_size:
            self._by_size[size] = World(size)
        return self._by_size[size]

    def retire(self):
        for world in self._by_size.values():
            world.retire()

    def close(self):
        for world in self._by_size.values():
            world.close()
        self._by_size.clear()
