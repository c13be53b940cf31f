"""vLLM's end of the weight transfer, for both transports.

Importing this file imports vLLM, and registers the receiver at vLLM's own extension point for weight updates; only
:mod:`rlhf_megatron.rollout.vllm_engine` imports it, when it builds an engine.

Slices are written into vLLM's parameters directly (:mod:`.vllm_slices`). Full tensors go through vLLM's layer-wise
reload: it buffers the tensors of a layer until the layer is complete, then copies them into fused parameters, runs
vLLM's post-processing (packing on CPU, quantisation on GPU) and writes the result into the storage that captured graphs
already know.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from rlhf_megatron.errors import WeightError
from rlhf_megatron.rollout.vllm_slices import Observe, SliceLoader

BACKEND = "rlhf_megatron"
"""Name of the receiver in vLLM's registry."""

_MAX_NAMED = 8
# vLLM's attribute of a parameter for "so many elements come from the checkpoint".
_ELEMENTS_TO_LOAD = "weight_loader_numel"


@dataclass
class ReceiverInitInfo(WeightTransferInitInfo):
    """Nothing has to be set up: the tensors are in this process."""


@dataclass
class ReceiverUpdateInfo(WeightTransferUpdateInfo):
    """One step of an update.

    Attributes:
        weights: (name as in the HuggingFace checkpoint, full tensor) pairs; may be overwritten by their owner after
            the call.
        written: Elements that were written of vLLM's parameters since the last step, by name, when slices come.
        complete: All weights have been sent: check that nothing is missing.
        abandon: The sender failed: give up what is half loaded.
    """

    weights: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    abandon: bool = False


class WeightReceiver(WeightTransferEngine[ReceiverInitInfo, ReceiverUpdateInfo]):
    """Loads full, HuggingFace-named tensors, or slices of vLLM's own parameters, into vLLM's model.

    Memory above vLLM's own weights with full tensors: :attr:`deferred_bytes` (tensors of layers that are not complete
    yet; with a stream in layer order less than the tensors of one fused parameter, for example q and k of one layer, or
    all experts of one layer, which vLLM fuses) and, while a layer is being finished, that layer's local shard once more
    unpacked and once packed.
    """

    init_info_cls = ReceiverInitInfo
    update_info_cls = ReceiverUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deferred_bytes = 0
        self._slices: SliceLoader | None = None
        # Per layer, how many of the waiting tensors are copies already.
        self._owned: dict[torch.nn.Module, int] = {}
        self._modules = dict(self.model.named_modules())
        mapping: dict[str, list[str]] = getattr(self.model, "packed_modules_mapping", {})
        self._fused_names = {part: fused for fused, parts in mapping.items() for part in parts}
        # Layers whose weights are another layer's: a tied head.
        self._tied = _layers_with_shared_weights(self.model)

    def init_transfer_engine(self, init_info: ReceiverInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Put every layer in the state in which it waits for its weights."""
        self._forget_deferred()
        initialize_layerwise_reload(self.model)
        for layer in self.model.modules():
            # Rows that pad the vocabulary never arrive; without this the layer, and the full tensors of embedding and
            # head, would wait for them until the end of the stream.
            if isinstance(layer, VocabParallelEmbedding):
                weight = cast(torch.Tensor, layer.weight)
                elements = layer.shard_indices.num_org_elements * weight.shape[1]
                setattr(weight, _ELEMENTS_TO_LOAD, elements)
            self._expect_packing(layer)

    def open_slices(self, observe: Observe | None) -> SliceLoader:
        """Expect slices in the update that has been started, in place of full tensors."""
        self._slices = SliceLoader(self.model, self.device, self._tied, observe)
        return self._slices

    def _expect_packing(self, layer: torch.nn.Module) -> None:
        """Make vLLM pack a layer's experts again on CPU.

        Once there is a kernel it only copies new experts over the old (0.32, ``UnquantizedFusedMoEMethod``), which is
        right for the GPU's, but leaves those of a CPU as they came; without one it makes it anew, and packs them.
        """
        quant_method = getattr(layer, "quant_method", None)
        if self.device.type == "cpu" and isinstance(quant_method, FusedMoEMethodBase):
            quant_method.moe_kernel = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; a failure leaves every layer runnable but with mixed old and new weights.

        Raises:
            WeightError: vLLM refused a tensor, or (``complete``) parameters were not written.
        """
        parsed = self.parse_update_info(update_info)
        self.receive_weights(parsed)
        if parsed.weights and self.device.type != "cpu":
            # Their owner may overwrite them now.
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ReceiverUpdateInfo) -> None:
        """See :meth:`update_weights`."""
        if update_info.abandon:
            self._abandon()
            return
        try:
            if update_info.weights:
                self._load(update_info.weights)
            if update_info.written and self._slices is not None:
                self._slices.wrote(update_info.written)
            if update_info.complete:
                self._check_complete() if self._slices is None else self._slices.check_complete()
        except Exception:
            self._abandon()
            raise

    def finish_weight_update(self) -> None:
        """Post-process layers without weights of their own (attention, tied heads)."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied:
            # Layer-wise reload gives a tied head its shared weight back, but not what vLLM derives from it: on CPU the
            # packed copy that computes the logits would stay that of the old weights.
            quant_method = getattr(layer, "quant_method", None)
            if quant_method is not None:
                quant_method.process_weights_after_loading(layer)
        self._forget_deferred()

    def shutdown(self) -> None:
        """Nothing to release."""

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self._refuse_ignored([name for name, _ in weights])
        try:
            self.model.load_weights(weights)  # type: ignore[operator]
        except Exception as error:
            names = ", ".join(name for name, _ in weights[:_MAX_NAMED])
            more = ", ..." if len(weights) > _MAX_NAMED else ""
            cause = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise WeightError(
                f"vLLM refused a tensor of the bucket {{{names}{more}}}: {cause}. Names and shapes must be those of "
                f"the HuggingFace checkpoint of {type(self.model).__name__}."
            ) from error
        self._own_deferred()

    def _refuse_ignored(self, names: list[str]) -> None:
        """vLLM drops a bias that its model class has no place for, silently; the log-probs would be another model's."""
        for name in names:
            path, _, kind = name.rpartition(".")
            if kind != "bias":
                continue
            parent, _, last = path.rpartition(".")
            module = self._modules.get(f"{parent}.{self._fused_names.get(last, last)}")
            if module is not None and getattr(module, "bias", None) is None:
                raise WeightError(
                    f"The checkpoint has {name}, but vLLM's {type(self.model).__name__} has no such bias and would "
                    "leave it out. This architecture cannot be rolled out with these biases."
                )

    def _own_deferred(self) -> None:
        """Copy what vLLM still waits with, so that the sender may free or reuse its bucket."""
        total = 0
        for layer in self.model.modules():
            waiting = get_layerwise_info(layer).loaded_weights
            owned = self._owned.get(layer, 0)
            for position, (_, bound) in enumerate(waiting):
                for key, value in bound.arguments.items():
                    if key == "param" or not isinstance(value, torch.Tensor):
                        continue
                    if position >= owned:
                        bound.arguments[key] = value.clone()
                    total += value.nbytes
            self._owned[layer] = len(waiting)
        self.deferred_bytes = total

    def _check_complete(self) -> None:
        missing = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or layer in self._tied or is_deferred_attention_layer(layer):
                continue
            needed = sum(get_tensor_load_numel(parameter) for parameter in layer.parameters(recurse=False))
            if info.load_numel < needed:
                missing.append(f"{name}: {info.load_numel} of {needed} elements ({_parameter_names(layer)})")
        if missing:
            shown = "\n  ".join(missing[:_MAX_NAMED])
            more = f"\n  and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
            raise WeightError(
                f"Weight sync left {len(missing)} vLLM layers incomplete; the stream must hold every tensor of the "
                f"HuggingFace checkpoint once:\n  {shown}{more}"
            )

    def _abandon(self) -> None:
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
                info.reset()
        self._forget_deferred()

    def _forget_deferred(self) -> None:
        self.deferred_bytes = 0
        self._slices = None
        self._owned.clear()


def _layers_with_shared_weights(model: torch.nn.Module) -> list[torch.nn.Module]:
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own and own <= seen:
            tied.append(layer)
        seen |= own
    return tied


def _parameter_names(layer: torch.nn.Module) -> str:
    return ", ".join(name for name, _ in layer.named_parameters(recurse=False))


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
