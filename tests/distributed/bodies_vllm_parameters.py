"""Body that asks a real vLLM model for its parameters; see test_vllm_parameters.py."""

from tests.distributed.bodies_rollout import engine_for


def shapes_of_parameters(folder: str, tp: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of vLLM's parameters as they are before they are packed: while it waits for weights."""
    engine = engine_for(folder, tp)
    receiver = engine._receiver()
    engine._llm.start_weight_update()
    # vLLM waits for the two of a tied pair apart, and shares them again afterwards.
    tied = {id(parameter) for layer in receiver._tied for parameter in layer.parameters(recurse=False)}
    parameters = receiver.model.named_parameters()
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters if id(parameter) not in tied}
    engine._update(abandon=True)
    engine._llm.finish_weight_update()
    return shapes
