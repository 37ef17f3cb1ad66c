"""Runs a step's chunks, so that one at fault takes no other with it."""

import logging
from collections.abc import Sequence

from paceline.engine.batch import BatchBuilder, Outcome, read_result
from paceline.engine.chunk import Chunk
from paceline.executors.base import Executor

logger = logging.getLogger("paceline.engine")


class Runner:
    """An executor that is given chunks and gives back outcomes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._batches = BatchBuilder(executor.kv_geometry.block_size)

    def run(self, chunks: Sequence[Chunk]) -> list[Outcome]:
        """Run a step; if that fails, its chunks one by one, so that only those at fault are lost.

        Running a chunk again is safe: KV writes are idempotent, and nothing is published before the commit.
        """
        try:
            return self._run_once(chunks)
        except Exception as error:
            logger.warning("executor failed on %d sequences, running them one by one: %s", len(chunks), error)
        return [outcome for chunk in chunks for outcome in self._run_alone(chunk)]

    def _run_alone(self, chunk: Chunk) -> list[Outcome]:
        try:
            return self._run_once([chunk])
        except Exception as error:
            logger.exception("request %s failed in the executor", chunk.request.request_id)
            return [Outcome(chunk, error=f"the executor failed: {error}")]

    def _run_once(self, chunks: Sequence[Chunk]) -> list[Outcome]:
        return read_result(chunks, self._executor.execute(self._batches.build(chunks)))
