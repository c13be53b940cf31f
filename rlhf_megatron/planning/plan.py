"""The plan of a run: everything that is computed about it, in one value that text, JSON and page are made from."""

from dataclasses import dataclass

from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.planning.advice import Advice, advise
from rlhf_megatron.planning.checkpoints import CheckpointPlan, plan_checkpoints
from rlhf_megatron.planning.generation import Generation, plan_generation
from rlhf_megatron.planning.gpus import GIB, GPU, Assumptions
from rlhf_megatron.planning.memory import PhaseMemory, RoleState, phase_memory, role_states
from rlhf_megatron.planning.step_time import StepTime, step_time
from rlhf_megatron.planning.traffic import sync_traffic
from rlhf_megatron.planning.workload import Workload, make_workload
from rlhf_megatron.weights.traffic import Traffic


@dataclass(frozen=True)
class Plan:
    """What a run will do and cost.

    Attributes:
        workload: Roles, layouts and batches.
        gpu: The kind of GPU.
        assumptions: What estimates rest on.
        generation: vLLM's memory.
        roles: Each role's memory.
        memory: The heaviest rank of each phase.
        traffic: Bytes of a weight sync.
        time: Estimate of a step.
        checkpoints: What they take on disk.
        advice: What to look at.
    """

    workload: Workload
    gpu: GPU
    assumptions: Assumptions
    generation: Generation
    roles: tuple[RoleState, ...]
    memory: tuple[PhaseMemory, ...]
    traffic: Traffic
    time: StepTime
    checkpoints: CheckpointPlan
    advice: tuple[Advice, ...]

    @property
    def memory_bytes(self) -> int:
        """Memory of a GPU."""
        return round(self.gpu.memory_gib * GIB)

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most memory."""
        return max(self.memory, key=lambda phase: phase.total)

    @property
    def headroom(self) -> float:
        """Share of a GPU's memory that is free at the peak; negative when it does not fit."""
        return 1 - self.peak.total / self.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether every phase fits, and vLLM's share holds its weights and at least one row of the greatest length."""
        return self.headroom >= 0 and self.generation.longest_at_once > 0


def make_plan(config: PPOConfig, gpu: GPU, assumptions: Assumptions) -> Plan:
    """Plan a run.

    Args:
        config: A validated configuration.
        gpu: The kind of GPU.
        assumptions: What estimates rest on.

    Raises:
        ConfigError: A model's sizes are not known.
    """
    workload = make_workload(config, assumptions.length)
    memory_bytes = round(gpu.memory_gib * GIB)
    generation = plan_generation(workload, memory_bytes)
    memory = tuple(phase_memory(workload, generation, round(assumptions.reserve_gib * GIB)))
    traffic = sync_traffic(workload)
    return Plan(
        workload,
        gpu,
        assumptions,
        generation,
        tuple(role_states(workload)),
        memory,
        traffic,
        step_time(workload, generation, traffic, gpu, assumptions),
        plan_checkpoints(workload),
        tuple(advise(workload, generation, memory, memory_bytes)),
    )
