"""A kind of point for the runner's tests: it trains nothing and ends as its settings say, in the last rank."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal

from upipe.config import Length
from upipe.preflight import PreflightError
from upipe.records import Record


@dataclass
class Point:
    ending: Literal["ok", "refused", "error", "sigkill", "hang"] = "ok"
    tokens: Length = 1024
    processes: int = 1
    method: Literal["upipe"] = "upipe"
    device: Literal["cpu"] = "cpu"
    seconds: float = 0.0


def record(point):
    return Record(method=point.method, model="none", tokens=point.tokens, sp=point.processes, dp=1)


def verdict(point):
    return "ok"


def run(point):
    if int(os.environ["RANK"]) != point.processes - 1:
        # As a rank that waits in a collective for one that is gone.
        time.sleep(0.2 if point.ending == "ok" else 60)
    elif point.ending == "refused":
        raise PreflightError("heads_per_stage=3 with 8 query heads on 2 ranks: use one of 2, 4, 6, 8")
    elif point.ending == "error":
        raise ValueError("no such thing")
    elif point.ending == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.ending == "hang":
        time.sleep(600)
    time.sleep(point.seconds)
    done = record(point)
    done.loss = 1.0
    return done
