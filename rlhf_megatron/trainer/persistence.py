"""What of a run outlives the job, and what a run begins from: the trainers' side of `checkpoint/`."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.checkpoint.agreement import agreed
from rlhf_megatron.checkpoint.folder import CheckpointFolder
from rlhf_megatron.checkpoint.job import JobCheckpoints
from rlhf_megatron.checkpoint.lock import run_lock
from rlhf_megatron.checkpoint.origin import Origin, find_origin, shape_facts
from rlhf_megatron.checkpoint.saving import SavedRole, Stateful
from rlhf_megatron.checkpoint.stop import StopRequest
from rlhf_megatron.config.ppo import PPOConfig, SFTConfig
from rlhf_megatron.engines.megatron_engine import MegatronEngine
from rlhf_megatron.parallel.failures import phase
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import Runtime
from rlhf_megatron.tracking.tracking import OUTPUTS, Tracker, set_aside


@dataclass(frozen=True)
class Start:
    """What is known before anything is built.

    Attributes:
        config: The run's configuration.
        run: The run's folder, which rank 0 holds the lock of.
        origin: What the run begins from.
        stop: Signals and time limit.
        models: Folder and network of each trained role.
    """

    config: PPOConfig | SFTConfig
    run: Path
    origin: Origin
    stop: StopRequest
    models: Mapping[str, tuple[str, dict]]

    @property
    def resume_step(self) -> int | None:
        """Step that the run goes on after; None for one that begins at step 0."""
        return self.origin.step

    def checkpoints(
        self,
        roles: Mapping[str, tuple[MegatronEngine | None, Layout]],
        documents: Mapping[str, Mapping[str, Stateful]],
        tracker: Tracker,
    ) -> JobCheckpoints:
        """Puts the checkpoints of the run together, and loads what it begins from.

        Args:
            roles: Engine (None on other ranks) and layout of each trained role.
            documents: Everything else that outlives a step: JSON files, each with its parts by name.
            tracker: Where the person who watches is told of them.

        Collective over the world. Raises CheckpointError when something cannot be loaded.
        """
        saved = [SavedRole(name, *place, *self.models[name]) for name, place in roles.items()]
        with phase("build_checkpoints"):
            checkpoints = JobCheckpoints(
                self.run,
                self.config.trainer,
                self.config.checkpoint,
                self.config.model_dump(mode="json"),
                self.origin,
                saved,
                documents,
                self.stop,
                tracker,
            )
        checkpoints.resume()
        # Once more, since libraries that were loaded meanwhile may have put handlers of their own in place.
        self.stop.listen()
        return checkpoints


def begin_run(
    config: PPOConfig | SFTConfig, runtime: Runtime, stack: ExitStack, say: Callable[[str], None] = print
) -> Start:
    """Takes the run's folder, and decides what the run begins from.

    Args:
        config: The validated configuration.
        runtime: This rank.
        stack: Frees the folder when the run is over.
        say: Where waiting for another job is reported.

    Raises:
        CheckpointError: Another job holds the folder, it cannot be written, or there is no checkpoint to go on from
            although there should be.

    Collective over the world.
    """
    stop = StopRequest(config.trainer.max_seconds)
    stop.listen()
    run = Path(config.trainer.default_local_dir).expanduser().absolute()
    store = CheckpointFolder(run)
    with phase("resume"):
        with agreed():
            if runtime.rank == 0:
                stack.enter_context(run_lock(run, config.checkpoint.lock_wait_s, say))
                store.remove_left_overs()
                store.unmark_stopped()
        with agreed():
            models = {
                name: (folder, shape_facts(folder, config.model.trust_remote_code))
                for name, folder in _model_folders(config).items()
            }
        shapes = {name: shape for name, (_, shape) in models.items()}
        origin = find_origin(run, config.trainer, config.checkpoint, shapes)
        with agreed():
            if runtime.rank == 0 and (origin.step is None or not origin.is_in(run)):
                set_aside(run, [*OUTPUTS, *store.names()])
    return Start(config, run, origin, stop, models)


def _model_folders(config: PPOConfig | SFTConfig) -> dict[str, str]:
    """The HuggingFace folder of each trained role."""
    if isinstance(config, SFTConfig):
        return {"actor": config.model.path}
    return {"actor": config.model.path, "critic": config.critic.model.path or config.model.path}
