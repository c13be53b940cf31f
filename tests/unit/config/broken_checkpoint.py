"""Broken configurations of checkpoints: more lines of the table in `broken_ppo.py`."""

from broken_ppo import case

SAVING = ("trainer.save_freq=10",)
BEST = (*SAVING, "checkpoint.keep_last=2", "checkpoint.keep_best.metric=val-core/sums/reward/mean@1")

BROKEN_CHECKPOINTS = (
    case("trainer.save_freq", "trainer.save_freq=0", "must be -1 (never) or positive"),
    case("trainer.save_freq", "trainer.save_freq=-2", "must be -1 (never) or positive"),
    case("trainer.max_seconds", "trainer.max_seconds=0", "> 0"),
    case("trainer.resume_mode", "trainer.resume_mode=always", "auto", "disable", "resume_path"),
    case("trainer.resume_from_path", "trainer.resume_mode=resume_path", "is needed", "global_step_N"),
    case("trainer.resume_from_path", "trainer.resume_from_path=run/global_step_3", "no effect", "auto"),
    case(
        "trainer.resume_from_path",
        (
            "trainer.default_local_dir=run",
            "trainer.resume_mode=resume_path",
            "trainer.resume_from_path=run/global_step_3",
            "checkpoint.load_contents=[model]",
        ),
        "begins at step 0",
        "Choose another trainer.default_local_dir",
    ),
    case("checkpoint.keep_last", (*SAVING, "checkpoint.keep_last=0"), "> 0"),
    case("checkpoint.keep_last", "checkpoint.keep_last=2", "no effect while trainer.save_freq is -1"),
    case("checkpoint.async_save", "checkpoint.async_save=true", "no effect while trainer.save_freq is -1"),
    case("checkpoint.keep_best", BEST[2:], "no effect while trainer.save_freq is -1"),
    case("checkpoint.keep_best", (*BEST, "trainer.test_freq=10", "~checkpoint.keep_last"), "keep_last is null"),
    case("checkpoint.keep_best", BEST, "trainer.save_freq is 10", "trainer.test_freq is -1"),
    case("checkpoint.keep_best", (*BEST, "trainer.test_freq=4"), "trainer.test_freq is 4", "divisor"),
    case("checkpoint.keep_best", (*BEST, "data.val_files=[]"), "data.val_files is empty"),
    case(
        "checkpoint.keep_best.metric",
        (*BEST, "trainer.test_freq=10", "checkpoint.keep_best.metric=critic/score/mean"),
        "val-core/",
    ),
    case(
        "checkpoint.save_contents",
        ("checkpoint.save_contents=[optimizer,extra]", "trainer.resume_mode=disable"),
        "without the model",
    ),
    case(
        "checkpoint.save_contents",
        ("checkpoint.save_contents=[extra]", "trainer.resume_mode=disable"),
        "must have the model",
    ),
    case("checkpoint.save_contents", "checkpoint.save_contents=[model,optimizer,extra,model]", "twice"),
    case("checkpoint.save_contents", "checkpoint.save_contents=[weights]", "model", "hf_model"),
    case("checkpoint.load_contents", "checkpoint.save_contents=[model,extra]", "optimizer", "does not save"),
    case("checkpoint.load_contents", "checkpoint.load_contents=[model]", "must have extra", "step 0"),
    case(
        "checkpoint.load_contents",
        ("checkpoint.load_contents=[model,extra]", "trainer.resume_mode=disable"),
        "no effect while trainer.resume_mode is disable",
    ),
)

WHOLE_CHECKPOINTS = (
    SAVING,
    (*BEST, "trainer.test_freq=5", "checkpoint.async_save=true"),
    ("checkpoint.save_contents=[model]", "trainer.resume_mode=disable", *SAVING),
    (
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=old/global_step_3",
        "checkpoint.load_contents=[model]",
    ),
    ("trainer.max_seconds=3600",),
    # Saves by signal only.
    ("checkpoint.save_contents=[model,optimizer,extra,hf_model]",),
)
