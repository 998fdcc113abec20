"""Who does the work of an acceptance run: this process, or one process a core that take tasks from one queue.

Results come one conversation at a time, so that whoever stops a run keeps all that was finished. Knows nothing of what
is measured.
"""

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from decoding.observation import ObservedRound
from evaluation.laboratory import Laboratory, LaboratoryOptions, Task
from evaluation.records import Measured
from modeling.runtime import die_with_parent, pin

POLL_S = 1.0


def _sent(observed: ObservedRound) -> tuple[Any, ...]:
    """How a round travels: as arrays, since torch would share its tensors' memory with a sender that may have ended."""
    rest = {name: getattr(observed, name) for name in ObservedRound.__slots__}
    return _received, (rest | {"log_p": observed.log_p.numpy(), "confidences": observed.confidences.numpy()},)


def _received(parts: dict[str, Any]) -> ObservedRound:
    arrays = {name: torch.from_numpy(parts[name]) for name in ("log_p", "confidences")}
    return ObservedRound(**(parts | arrays))


ForkingPickler.register(ObservedRound, _sent)


class WorkerFailed(RuntimeError):
    """A measuring process ended before its work did; the message says why, where it could."""


@contextmanager
def measuring(options: LaboratoryOptions, tasks: Sequence[Task], num_workers: int) -> Iterator[Iterator[Measured]]:
    """Results of all tasks as they come. Leaving early ends the work. What cannot be loaded raises as `Laboratory`."""
    if num_workers == 1:
        pin(None)
        laboratory = Laboratory(options)
        yield (measured for task in tasks for measured in laboratory.measure(task))
        return
    crew = _Crew(options, tasks, num_workers)
    try:
        yield crew.results()
    finally:
        crew.end()


class _Crew:
    """Measuring processes. A result of None says that a process has found no further task."""

    def __init__(self, options: LaboratoryOptions, tasks: Sequence[Task], num_workers: int) -> None:
        context: SpawnContext = multiprocessing.get_context("spawn")
        self._results: Queue[Measured | Exception | None] = context.Queue()
        waiting: Queue[Task | None] = context.Queue()
        for task in [*tasks, *[None] * num_workers]:
            waiting.put(task)
        cores = sorted(os.sched_getaffinity(0))
        self._processes: list[SpawnProcess] = [
            context.Process(
                target=_work,
                args=(options, waiting, self._results, cores[index % len(cores)], os.getpid()),
                daemon=True,
            )
            for index in range(num_workers)
        ]
        self._waiting = waiting
        for process in self._processes:
            process.start()

    def results(self) -> Iterator[Measured]:
        """Until every process is done. Raises what one of them raised, or `WorkerFailed` when one is gone."""
        num_working = len(self._processes)
        while num_working:
            try:
                result = self._results.get(timeout=POLL_S)
            except queue.Empty:
                gone = [process for process in self._processes if process.exitcode not in (None, 0)]
                if gone:
                    raise WorkerFailed(f"a measuring process ended with status {gone[0].exitcode}") from None
                continue
            if result is None:
                num_working -= 1
            elif isinstance(result, Exception):
                raise result
            else:
                yield result

    def end(self) -> None:
        """Stop all processes, whatever they are doing."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for channel in (self._waiting, self._results):
            channel.cancel_join_thread()
            channel.close()


def _work(
    options: LaboratoryOptions,
    waiting: "Queue[Task | None]",
    results: "Queue[Measured | Exception | None]",
    core: int,
    parent_pid: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent decides
    die_with_parent(parent_pid)
    pin(core)
    try:
        laboratory = Laboratory(options)
        while (task := waiting.get()) is not None:
            for measured in laboratory.measure(task):
                results.put(measured)
        results.put(None)
    except Exception as error:  # noqa: BLE001 - the top of a process: the parent raises it
        results.put(error if _can_travel(error) else WorkerFailed(f"{type(error).__name__}: {error}"))


def _can_travel(error: Exception) -> bool:
    """Whether the parent can raise the same error: it must be one that is made from its message."""
    return error.args == (str(error),)
