"""Several processes measure what one measures, and what goes wrong in one of them is said."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.acceptance import Study
from evaluation.contestants import ContestantFiles, ContestantSettings
from evaluation.crew import WorkerFailed, measuring
from evaluation.laboratory import LaboratoryOptions
from evaluation.prompts import Prompt, load_prompts
from evaluation.records import Records, Row
from evaluation.replay import Variant
from modeling.architecture import UnsupportedModel
from tests.tiny.models import TinyModels


@pytest.fixture
def options(folders: TinyModels, target_folder: Path) -> LaboratoryOptions:
    settings = ContestantSettings((5,), 128, "none", (Variant("served", 1, "replace"),), 5)
    files = ContestantFiles(folders.draft(), folders.adapter())
    return LaboratoryOptions(target_folder, {"jetspec++": files}, {}, settings, 12, "float32", "cpu")


@pytest.fixture
def study(prompts_folder: Path) -> Study:
    return Study({"words": load_prompts("words", prompts_folder, 6)}, (0.0, 1.0))


def rows_of(options: LaboratoryOptions, study: Study, num_workers: int) -> list[Row]:
    records = Records()
    with measuring(options, study.tasks(), num_workers) as results:
        for measured in results:
            records.add(measured)
    assert {item.prompt for item in records.observed[5]} == set(range(6))
    return sorted(records.rows(), key=lambda row: row.temperature)


def test_tasks_take_some_prompts_of_every_unit_before_more_of_any() -> None:
    prompts = [Prompt(str(number), "t9") for number in range(6)]
    tasks = Study({"a": prompts, "b": prompts[:3]}, (0.0, 1.0)).tasks()
    places = [(task.unit.dataset, task.unit.temperature, task.first_number, len(task.prompts)) for task in tasks]
    assert places == [
        *(("a", 0.0, 0, 4), ("a", 1.0, 0, 4), ("b", 0.0, 0, 3), ("b", 1.0, 0, 3)),
        *(("a", 0.0, 4, 2), ("a", 1.0, 4, 2)),
    ]


def test_two_processes_find_what_one_finds(options: LaboratoryOptions, study: Study) -> None:
    assert rows_of(options, study, 2) == rows_of(options, study, 1)


def test_what_a_process_cannot_load_is_raised_here(options: LaboratoryOptions, study: Study, tmp_path: Path) -> None:
    broken = replace(options, files={"jetspec++": ContestantFiles(tmp_path, options.files["jetspec++"].adapter)})
    with pytest.raises(UnsupportedModel, match=str(tmp_path)), measuring(broken, study.tasks(), 2) as results:
        list(results)


def killed(options: LaboratoryOptions, study: Study) -> None:
    """Measures with processes that are gone."""
    with measuring(options, study.tasks(), 2) as results:
        for process in multiprocessing.active_children():
            process.kill()
        list(results)


def test_a_process_that_is_killed_is_noticed(options: LaboratoryOptions, study: Study) -> None:
    with pytest.raises(WorkerFailed, match="status -9"):
        killed(options, study)
    assert not multiprocessing.active_children()
