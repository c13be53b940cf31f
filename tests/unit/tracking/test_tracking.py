"""Files that a person or a tool reads back, also after a kill and a resume."""

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_megatron.errors import ConfigError, RLHFError
from rlhf_megatron.tracking.files import CSVFile
from rlhf_megatron.tracking.tracking import NullTracking, Tracking

FILES = ("csv", "jsonl")


def _csv(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows), "rows as long as the header"
    return rows


def _jsonl(path: Path) -> list[dict]:
    def refuse(word: str):
        raise ValueError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def _train(run_dir: Path, steps, *, resume_step=None, loggers=FILES, value=lambda step: step / 4) -> None:
    with Tracking(loggers, run_dir, resume_step=resume_step, stream=io.StringIO()) as tracking:
        for step in steps:
            tracking.log({"actor": {"pg_loss": value(step)}}, step)
            tracking.log_samples([{"prompt": "p", "response": f"r{step}", "score": 1.0}], step)


def test_csv_gets_columns_that_appear_later_without_harm_to_earlier_rows(tmp_path):
    with Tracking(["csv"], tmp_path) as tracking:
        tracking.log({"a": 1.5}, 1)
        tracking.log({"a": 2.5, 'odd, "name"': 3}, 2)
        tracking.log({"b": "text, with comma"}, 3)
        assert len(_csv(tmp_path)) == 3, "readable while the run goes on"
        tracking.log({"a": 4.5}, 4)
    assert _csv(tmp_path) == [
        {"step": "1", "a": "1.5", 'odd, "name"': "", "b": ""},
        {"step": "2", "a": "2.5", 'odd, "name"': "3", "b": ""},
        {"step": "3", "a": "", 'odd, "name"': "", "b": "text, with comma"},
        {"step": "4", "a": "4.5", 'odd, "name"': "", "b": ""},
    ]
    assert not list(tmp_path.glob("*.part"))


def test_numbers_survive_exactly(tmp_path):
    values = {"third": 1 / 3, "tiny": 5e-324, "big": 2**60, "negative": -0.1, "nan": math.nan, "inf": -math.inf}
    with Tracking(FILES, tmp_path) as tracking:
        tracking.log(values, 1)
    (row,) = _csv(tmp_path)
    (record,) = _jsonl(tmp_path / "metrics.jsonl")
    for name, value in values.items():
        for read in (float(row[name]), float(record[name])):
            assert read == value or (math.isnan(read) and math.isnan(value))


def test_a_step_in_two_parts_is_one_row(tmp_path):
    with Tracking(FILES, tmp_path) as tracking:
        tracking.log({"a": 1}, 1)
        tracking.log({"a": 2}, 2)
        tracking.log({"val-core": {"x": 0.5}}, 2)
        tracking.log({"a": 3}, 3)
    assert [(row["step"], row["a"], row["val-core/x"]) for row in _csv(tmp_path)] == [
        ("1", "1", ""),
        ("2", "2", "0.5"),
        ("3", "3", ""),
    ]
    assert _jsonl(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": 1},
        {"step": 2, "a": 2, "val-core/x": 0.5},
        {"step": 3, "a": 3},
    ]


def test_a_resumed_run_has_each_step_once(tmp_path):
    _train(tmp_path, range(1, 8))
    _train(tmp_path, range(5, 11), resume_step=4, value=lambda step: 100.0 + step)
    expected = [*(step / 4 for step in range(1, 5)), *(100.0 + step for step in range(5, 11))]
    for rows in (_csv(tmp_path), _jsonl(tmp_path / "metrics.jsonl")):
        assert [int(row["step"]) for row in rows] == list(range(1, 11))
        assert [float(row["actor/pg_loss"]) for row in rows] == expected
    samples = _jsonl(tmp_path / "samples.jsonl")
    assert [(sample["step"], sample["response"]) for sample in samples] == [(s, f"r{s}") for s in range(1, 11)]


def test_a_second_resume_and_new_columns_after_it(tmp_path):
    _train(tmp_path, range(1, 6))
    _train(tmp_path, range(4, 6), resume_step=3)
    with Tracking(FILES, tmp_path, resume_step=3) as tracking:
        tracking.log({"val": 1.0}, 3)  # Validation again at the step that was resumed from.
        tracking.log({"new": 2.0}, 4)
    assert _csv(tmp_path) == [
        {"step": "1", "actor/pg_loss": "0.25", "val": "", "new": ""},
        {"step": "2", "actor/pg_loss": "0.5", "val": "", "new": ""},
        {"step": "3", "actor/pg_loss": "0.75", "val": "1.0", "new": ""},
        {"step": "4", "actor/pg_loss": "", "val": "", "new": "2.0"},
    ]
    assert [record["step"] for record in _jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_line_cut_off_by_a_kill_is_dropped_at_resume(tmp_path, cut):
    _train(tmp_path, range(1, 5))
    for name in ("metrics.csv", "metrics.jsonl", "samples.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-cut])
    _train(tmp_path, [4, 5], resume_step=4, value=lambda step: 100.0 + step)
    assert [row["step"] for row in _csv(tmp_path)] == ["1", "2", "3", "4", "5"]
    assert [float(row["actor/pg_loss"]) for row in _csv(tmp_path)] == [0.25, 0.5, 0.75, 104.0, 105.0]
    assert [row["step"] for row in _jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    # A record that only lacks its line end is whole, hence kept.
    again = [4] if cut == 1 else []
    assert [row["step"] for row in _jsonl(tmp_path / "samples.jsonl")] == [1, 2, 3, *again, 4, 5]


def test_resume_without_earlier_records_or_from_step_0(tmp_path):
    _train(tmp_path / "new", [6], resume_step=5)
    assert [row["step"] for row in _csv(tmp_path / "new")] == ["6"]
    _train(tmp_path / "old", [1, 2])
    _train(tmp_path / "old", [1], resume_step=0)
    assert [row["step"] for row in _csv(tmp_path / "old")] == ["1"]


def test_a_csv_of_something_else_is_not_continued(tmp_path):
    (tmp_path / "metrics.csv").write_text("x,y\n1,2\n")
    CSVFile(tmp_path / "metrics.csv", resume_step=3).log({"a": 1}, 4)
    assert _csv(tmp_path) == [{"step": "4", "a": "1"}]


def test_a_new_run_in_a_used_folder_keeps_the_earlier_records(tmp_path):
    for run in range(3):
        _train(tmp_path, [1], value=lambda step, run=run: float(run), loggers=("csv", "jsonl", "tensorboard"))
    for folder, run in ((tmp_path / "previous_1", 0), (tmp_path / "previous_2", 1), (tmp_path, 2)):
        assert [float(row["actor/pg_loss"]) for row in _csv(folder)] == [run]
        assert len(list((folder / "tensorboard").iterdir())) == 1


def test_samples_with_any_content_are_one_line_each(tmp_path):
    sample = {"prompt": "Grüße\n\u2028\x00", "response": "ß" * 10_000, "score": float("nan"), "uid": object}
    with Tracking([], tmp_path) as tracking:
        tracking.log_samples([sample, sample], 3)
        tracking.log_samples([], 4)
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3
    read = json.loads(lines[0])
    assert (read["step"], read["prompt"], read["response"]) == (3, sample["prompt"], sample["response"])


def _scalars(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    with Tracking(["tensorboard"], tmp_path, "p", "e", {"actor": {"lr": 1e-6}}) as tracking:
        tracking.log({"actor": {"pg_loss": 0.5}, "timing_s/gen": 2, "text": "not a number"}, 1)
        tracking.log({"actor": {"pg_loss": 0.25}}, 2)
        assert _scalars(tmp_path)["actor/pg_loss"] == [(1, 0.5), (2, 0.25)], "readable while the run goes on"
    assert _scalars(tmp_path) == {"actor/pg_loss": [(1, 0.5), (2, 0.25)], "timing_s/gen": [(1, 2.0)]}


def test_tensorboard_of_a_resumed_run_has_each_step_once(tmp_path):
    _train(tmp_path, range(1, 8), loggers=["tensorboard"])
    _train(tmp_path, range(5, 11), loggers=["tensorboard"], resume_step=4, value=lambda step: 100.0 + step)
    expected = [*((step, step / 4) for step in range(1, 5)), *((step, 100.0 + step) for step in range(5, 11))]
    assert _scalars(tmp_path)["actor/pg_loss"] == expected


def test_console_says_where_things_are_and_a_line_a_step(tmp_path):
    stream = io.StringIO()
    with Tracking(["console"], tmp_path, "mine", "ppo", total_steps=2, stream=stream) as tracking:
        tracking.log({"actor": {"pg_loss": 0.5}}, 1)
        tracking.print("a remark")
    first, second, third = stream.getvalue().splitlines()
    assert "mine/ppo" in first
    assert str(tmp_path) in first
    assert second.startswith("Step 1 | Actor Loss: 0.5000 | ")
    assert third == "a remark"


def test_bad_settings_and_metrics_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.logger.*wandb"):
        Tracking(["csv", "wandb"], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir.*cannot be written"):
        Tracking(["csv"], tmp_path / "file")
    with Tracking(["csv"], tmp_path) as tracking, pytest.raises(RLHFError, match="'actor/losses'"):
        tracking.log({"actor": {"losses": [1, 2]}}, 1)


def test_other_ranks_record_nothing(tmp_path):
    with NullTracking() as tracking:
        tracking.log({"anything": object()}, 1)
        tracking.log_samples([{"prompt": "p"}], 1)
        tracking.print("unseen")
    assert list(tmp_path.iterdir()) == []


def test_tracking_without_tensorboard_loads_no_torch(tmp_path):
    script = f"""
import sys
from rlhf_megatron.tracking.tracking import Tracking
with Tracking(["console", "csv", "jsonl"], {str(tmp_path)!r}) as tracking:
    tracking.log({{"a": 1}}, 1)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)})
