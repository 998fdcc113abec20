"""An acceptance run: tasks in an order that lets it be cut anywhere, progress, and results that are saved as it goes.

Prompts are taken some at a time from every data set and temperature in turn, so a run that is stopped has measured all
of them on equally many prompts, give or take a few.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evaluation.crew import measuring
from evaluation.laboratory import LaboratoryOptions, Task
from evaluation.prompts import Prompt
from evaluation.records import Records, Unit

PROMPTS_AT_A_TIME = 4


@dataclass(frozen=True)
class Study:
    """What is to be measured: prompts by data set, temperatures, and a limit of time."""

    prompts: Mapping[str, Sequence[Prompt]]
    temperatures: tuple[float, ...]
    minutes: float | None = None

    @property
    def units(self) -> list[Unit]:
        """Every data set at every temperature."""
        return [Unit(dataset, temperature) for dataset in self.prompts for temperature in self.temperatures]

    def tasks(self) -> list[Task]:
        """All work, some prompts of every unit before more of any."""
        longest = max(len(prompts) for prompts in self.prompts.values())
        return [
            Task(unit, start, tuple(self.prompts[unit.dataset][start : start + PROMPTS_AT_A_TIME]))
            for start in range(0, longest, PROMPTS_AT_A_TIME)
            for unit in self.units
            if start < len(self.prompts[unit.dataset])
        ]


@dataclass
class Outcome:
    """What a run has measured. `is_interrupted`: somebody stopped it; a time limit that ran out is no interruption."""

    records: Records
    is_interrupted: bool = False


def run_study(
    study: Study,
    options: LaboratoryOptions,
    num_workers: int,
    save: Callable[[Records], None],
) -> Outcome:
    """Measure until all is done, time is up or somebody interrupts. `save` is called after every round of tasks."""
    outcome = Outcome(Records(study.units))
    tasks = study.tasks()
    total = sum(len(task.prompts) for task in tasks)
    started, progress = time.monotonic(), _Progress(total, study.minutes)
    per_round = PROMPTS_AT_A_TIME * len(study.units)
    try:
        with measuring(options, tasks, num_workers) as results:
            for done, measured in enumerate(results, start=1):
                outcome.records.add(measured)
                elapsed_s = time.monotonic() - started
                progress.show(done, elapsed_s, measured.unit)
                if done % per_round == 0 and done < total:
                    save(outcome.records)
                if study.minutes is not None and elapsed_s >= 60 * study.minutes and done < total:
                    print(f"time is up after {done} of {total} conversations", file=sys.stderr, flush=True)
                    break
    except KeyboardInterrupt:
        print("interrupted; what was measured follows", file=sys.stderr, flush=True)
        outcome.is_interrupted = True
    return outcome


class _Progress:
    """A line a conversation, with how long the rest will take at the pace so far."""

    def __init__(self, total: int, minutes: float | None) -> None:
        self._total = total
        self._limit_s = None if minutes is None else 60 * minutes

    def show(self, done: int, elapsed_s: float, unit: Unit) -> None:
        left_s = elapsed_s / done * (self._total - done)
        if self._limit_s is not None:
            left_s = min(left_s, max(0.0, self._limit_s - elapsed_s))
        print(
            f"{done}/{self._total} conversations ({unit.dataset}, T={unit.temperature:g}), "
            f"{_clock(elapsed_s)}, about {_clock(left_s)} left",
            file=sys.stderr,
            flush=True,
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
