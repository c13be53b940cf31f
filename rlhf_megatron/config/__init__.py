"""What may be chosen: typed configuration, without torch.

The pydantic models in this package are the only home of defaults and of the documentation of each leaf. Hydra composes
(`compose.py`), pydantic types (`parse.py`), `validate.py` checks what spans several leaves, `command_line.py` is what
the entries call.
"""

from rlhf_megatron.config.command_line import main_config
from rlhf_megatron.config.compose import get_config

__all__ = ["get_config", "main_config"]
