"""What all configuration nodes share: frozen, typed, and closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    """A node of the configuration tree.

    Attribute docstrings are the reference documentation of each leaf. Instances are frozen: what was validated is what
    runs. Unknown keys are refused.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )
