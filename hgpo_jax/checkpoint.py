"""Checkpoints of a run: parameters and optimizer state by Orbax, the reference policy once as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints under `folder`, numbered by the iterations done; written in the background, whole or not at all."""

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """Iterations done at the newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, iterations: int, state) -> None:
        """Starts writing; `state` may be donated right after."""
        self._manager.save(iterations, args=ocp.args.StandardSave(state))

    def restore(self, iterations: int, like):
        """The state of a checkpoint, placed as `like` (arrays of the same shapes on the same mesh)."""
        target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
        return self._manager.restore(iterations, args=ocp.args.StandardRestore(target))

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()
