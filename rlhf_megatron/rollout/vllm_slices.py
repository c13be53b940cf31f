"""Weights by slices, on vLLM's side: opens vLLM's parameters for writing, and has vLLM finish each full layer.

A layer (a module with parameters of its own) whose loaded form is the form that it computes with is written where it
lies: norms, embeddings, and on a GPU every unquantised linear layer. Any other is made anew in its loaded form when its
first slice comes, and given to vLLM's layer-wise reload when the last one has come, which packs (CPU), shuffles
(kernels for experts) or quantises it and copies the result into the storage that captured graphs know. So at most the
layers of which a part has arrived are held twice.

Only :mod:`.vllm_receiver` imports this file. Private names are vLLM 0.32's.
"""

from collections.abc import Callable, Mapping

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from rlhf_megatron.errors import WeightError

Observe = Callable[[str, torch.Tensor], None]
"""Called with the name of a parameter and all of it, as it was loaded, before vLLM changes its form."""

_MAX_NAMED = 8


class SliceLoader:
    """One update of a model's weights by slices.

    Args:
        model: vLLM's model, its layers waiting for weights (``initialize_layerwise_reload``).
        device: Where it is.
        tied: Layers whose weights are another layer's: nothing comes for them.
        observe: Told of each parameter once it is full; may be None.

    Attributes:
        held_bytes: Size of the layers that are held twice now.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        tied: list[torch.nn.Module],
        observe: Observe | None,
    ):
        self._model = model
        self._observe = observe
        self._names: dict[str, tuple[torch.nn.Module, str]] = {}
        self._waiting: dict[torch.nn.Module, dict[str, int]] = {}
        self._in_place: set[torch.nn.Module] = set()
        self._sizes: dict[torch.nn.Module, int] = {}
        self.held_bytes = 0
        for path, layer in model.named_modules():
            info = get_layerwise_info(layer)
            if layer in tied or not info.can_load() or is_deferred_attention_layer(layer):
                continue
            parameters = dict(layer.named_parameters(recurse=False))
            if not parameters:
                continue
            self._waiting[layer] = {name: parameter.numel() for name, parameter in parameters.items()}
            self._names |= {f"{path}.{name}": (layer, name) for name in parameters}
            if _keeps_its_form(layer, device):
                _place_kernel_tensors(layer, info)
                info.reset()
                self._in_place.add(layer)

    def open(self, name: str) -> torch.Tensor:
        """The parameter in its loaded form.

        Raises:
            WeightError: vLLM has no such parameter, or all of it was written already.
        """
        if name not in self._names:
            raise WeightError(
                f"vLLM's {type(self._model).__name__} has no parameter {name}: it would leave these weights out, and "
                "generate with another model than is trained. This architecture cannot be rolled out with them."
            )
        layer, attribute = self._names[name]
        if layer not in self._waiting:
            raise WeightError(f"Weight sync wants to write {name} again, although all of it was written.")
        if layer not in self._in_place and layer not in self._sizes:
            materialize_layer(layer, get_layerwise_info(layer))
            self._sizes[layer] = sum(parameter.nbytes for parameter in layer.parameters(recurse=False))
            self.held_bytes += self._sizes[layer]
        return getattr(layer, attribute).data

    def wrote(self, elements: Mapping[str, int]) -> None:
        """Count what was written, and finish the layers that are full.

        Raises:
            WeightError: More was written of a parameter than it holds.
        """
        layers: dict[torch.nn.Module, None] = {}
        for name, count in elements.items():
            layer, attribute = self._names[name]
            left = self._waiting[layer][attribute] - count
            if left < 0:
                raise WeightError(f"Weight sync wrote {-left} elements of {name} twice.")
            self._waiting[layer][attribute] = left
            layers[layer] = None
        for layer in layers:
            if not any(self._waiting[layer].values()):
                self._finish(layer)

    def check_complete(self) -> None:
        """Refuse an update that left something out.

        Raises:
            WeightError: Parameters were not written, or in part only.
        """
        missing = [
            f"{name}: {self._waiting[layer][attribute]} elements"
            for name, (layer, attribute) in self._names.items()
            if self._waiting.get(layer, {}).get(attribute)
        ]
        if missing:
            shown = "\n  ".join(missing[:_MAX_NAMED])
            more = f"\n  and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
            raise WeightError(
                f"Weight sync left {len(missing)} parameters of vLLM's {type(self._model).__name__} incomplete:\n  "
                f"{shown}{more}\nThe actor's model has no weights for them: the two architectures differ."
            )

    def _finish(self, layer: torch.nn.Module) -> None:
        del self._waiting[layer]
        if self._observe is not None:
            for name, (owner, attribute) in self._names.items():
                if owner is layer:
                    self._observe(name, getattr(layer, attribute).data)
        if layer in self._in_place:
            quant_method = getattr(layer, "quant_method", None)
            if isinstance(quant_method, QuantizeMethodBase):
                quant_method.process_weights_after_loading(layer)
        else:
            _layerwise_process(layer, get_layerwise_info(layer))
            self.held_bytes -= self._sizes.pop(layer)


def _keeps_its_form(layer: torch.nn.Module, device: torch.device) -> bool:
    """Whether vLLM computes with a layer's parameters as they were loaded."""
    quant_method = getattr(layer, "quant_method", None)
    if quant_method is None or type(quant_method) is UnquantizedEmbeddingMethod:
        return True
    return device.type == "cuda" and type(quant_method) is UnquantizedLinearMethod
