"""RLHF for language models that need Megatron-Core, without Ray.

One torchrun program, the same on every rank. Importing this package loads neither torch nor any other heavy library.
"""

from rlhf_megatron.config import get_config

__version__ = "0.1.0"
__all__ = ["__version__", "get_config"]
