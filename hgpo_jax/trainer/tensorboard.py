"""TensorBoard events of a run, apart from other metrics because tensorboardX imports PyTorch if that is installed."""

from __future__ import annotations

import math
import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from hgpo_jax.trainer.metrics import flatten


class TensorBoard:
    """Events under folder/tensorboard; those of an interrupted run after `keep` iterations do not count.

    The calling thread writes them: tensorboardX's SummaryWriter has a thread and a queue for them. If that thread dies, for
    example on a full disk, the queue fills up and every writer waits for ever.
    """

    def __init__(self, folder: Path, keep: int):
        (folder / "tensorboard").mkdir(exist_ok=True)
        self._events = EventsWriter(str(folder / "tensorboard" / "events"))
        self._flushed = -math.inf
        self._add(Event(step=keep, session_log=SessionLog(status=SessionLog.START)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)
        if event.wall_time - self._flushed > 30:  # flushing also waits for the disk
            self._events.flush()
            self._flushed = event.wall_time

    def write(self, row: dict) -> None:
        values = [
            Summary.Value(tag=name.replace(".", "/"), simple_value=value)
            for name, value in flatten(row).items()
            if name != "iteration"
        ]
        self._add(Event(step=row["iteration"], summary=Summary(value=values)))

    def close(self) -> None:
        self._events.close()
