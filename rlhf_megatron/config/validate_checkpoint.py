"""Rules about checkpoints: when they are saved, which are kept, and what a run begins from."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_megatron.config.rules import is_set
from rlhf_megatron.errors import Violation

SFT_METRIC = "val/loss"
"""The one validation metric of fine-tuning."""
PPO_METRIC = "val-core/"
"""Prefix of the validation metrics of RL."""


def cadence(config: Any) -> Iterator[Violation]:
    """Steps between checkpoints: -1, or a positive number."""
    every = config.trainer.save_freq
    if every == 0 or every < -1:
        fix = "Set it to -1 or to 1 or more."
        yield Violation("trainer.save_freq", every, "must be -1 (never) or positive.", fix)


def only_when_saving(config: Any) -> Iterator[Violation]:
    """What says how checkpoints of a cadence are written and kept needs one."""
    if config.trainer.save_freq != -1:
        return
    for name in ("keep_last", "keep_best", "async_save"):
        leaf, value = f"checkpoint.{name}", getattr(config.checkpoint, name)
        if is_set(config, leaf) and value:
            fix = f"Set trainer.save_freq, or take it out with ~{leaf}."
            shown = value if isinstance(value, bool | int) else value.metric
            yield Violation(leaf, shown, "has no effect while trainer.save_freq is -1.", fix)


def saved_parts(config: Any) -> Iterator[Violation]:
    """A checkpoint has each part once, and is not empty."""
    for name in ("save_contents", "load_contents"):
        parts, leaf = getattr(config.checkpoint, name), f"checkpoint.{name}"
        if len(set(parts)) != len(parts):
            yield Violation(leaf, parts, "names a part twice.", "Take it out.")
        if "optimizer" in parts and "model" not in parts:
            rule = "has the optimizer without the model that it belongs to."
            yield Violation(leaf, parts, rule, "Add model, or take optimizer out.")
        elif not parts or parts == ["extra"]:
            yield Violation(leaf, parts, "must have the model, or nothing could go on from it.", "Add model.")


def loaded_parts(config: Any) -> Iterator[Violation]:
    """What is loaded must have been saved, and a run that goes on by itself must know where it was."""
    trainer, checkpoint = config.trainer, config.checkpoint
    load, leaf = checkpoint.load_contents, "checkpoint.load_contents"
    if trainer.resume_mode == "disable":
        if is_set(config, leaf):
            fix = f"Set trainer.resume_mode=auto, or take it out with ~{leaf}."
            yield Violation(leaf, load, "has no effect while trainer.resume_mode is disable.", fix)
        return
    if "extra" not in load and trainer.resume_mode == "auto":
        rule = "must have extra while trainer.resume_mode is auto, or every restart would begin at step 0 again."
        fix = "Add extra, or begin a new run with trainer.resume_mode=resume_path and trainer.resume_from_path=..."
        yield Violation(leaf, load, rule, fix + ".")
    missing = [part for part in load if part not in checkpoint.save_contents]
    if missing and trainer.resume_mode == "auto":
        rule = f"has {', '.join(missing)}, which checkpoint.save_contents {checkpoint.save_contents} does not save."
        yield Violation(leaf, load, rule, "Add it there, or set trainer.resume_mode=disable.")


def where_from(config: Any) -> Iterator[Violation]:
    """`resume_path` needs a path, and a path needs `resume_path`."""
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    leaf = "trainer.resume_from_path"
    if mode == "resume_path" and path is None:
        fix = "Give a folder global_step_N, or set trainer.resume_mode=auto."
        yield Violation(leaf, path, "is needed while trainer.resume_mode is resume_path.", fix)
    elif mode != "resume_path" and path is not None:
        fix = f"Set trainer.resume_mode=resume_path, or take it out with ~{leaf}."
        yield Violation(leaf, path, f"has no effect while trainer.resume_mode is {mode}.", fix)
    elif path is not None and "extra" not in config.checkpoint.load_contents:
        run = Path(config.trainer.default_local_dir).expanduser().absolute()
        if Path(path).expanduser().absolute().parent == run:
            rule = "is in trainer.default_local_dir, where a run that begins at step 0 writes its own checkpoints."
            fix = "Choose another trainer.default_local_dir, or add extra to checkpoint.load_contents."
            yield Violation(leaf, path, rule, fix)


def resume_folder(config: Any) -> Iterator[Violation]:
    """The checkpoint to begin from must be there."""
    path = config.trainer.resume_from_path
    if path is not None and not os.path.isdir(Path(path).expanduser()):
        rule = f"must be a folder global_step_N, and is not there (looked for {Path(path).expanduser().resolve()})."
        yield Violation("trainer.resume_from_path", path, rule, "Correct the path.")


def best(config: Any) -> Iterator[Violation]:
    """The best checkpoint can be known only among those that were validated."""
    best, trainer = config.checkpoint.keep_best, config.trainer
    if best is None or trainer.save_freq < 1:
        return
    leaf = "checkpoint.keep_best"
    if config.checkpoint.keep_last is None:
        fix = "Set checkpoint.keep_last, or take it out with ~checkpoint.keep_best."
        yield Violation(leaf, best.metric, "has no effect while checkpoint.keep_last is null: all are kept.", fix)
    if not config.data.val_files:
        fix = "Give data.val_files, or take it out with ~checkpoint.keep_best."
        yield Violation(leaf, best.metric, "has no effect while data.val_files is empty.", fix)
    elif trainer.test_freq < 1 or trainer.save_freq % trainer.test_freq:
        rule = (
            f"needs a validation at every step that is saved, but trainer.save_freq is {trainer.save_freq} and "
            f"trainer.test_freq is {trainer.test_freq}."
        )
        yield Violation(leaf, best.metric, rule, f"Set trainer.test_freq={trainer.save_freq}, or a divisor of it.")


def _metric_is(prefix: str, example: str) -> Any:
    def metric(config: Any) -> Iterator[Violation]:
        best = config.checkpoint.keep_best
        if best is not None and not best.metric.startswith(prefix):
            rule = f"must be a validation metric, and those begin with {prefix}."
            yield Violation("checkpoint.keep_best.metric", best.metric, rule, f"Give for example {example}.")

    return metric


COMMON_RULES = (cadence, only_when_saving, saved_parts, loaded_parts, where_from, best)
"""Rules about any run."""
PPO_RULES = (_metric_is(PPO_METRIC, "val-core/<data source>/reward/mean@1"),)
"""Rules about a PPO run."""
SFT_RULES = (_metric_is(SFT_METRIC, "val/loss with checkpoint.keep_best.mode=min"),)
"""Rules about a fine-tuning run."""
FILE_RULES = (resume_folder,)
"""Rules about what must be there before a run."""
