"""Shared base of all configuration sections: strict, documented, frozen after loading."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A configuration section. Unknown keys are errors (`protocol.config.load` names the nearest valid key)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())
