"""What all bodies of requests have in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from glm_dcp_jax.serve.unsupported import refuse_unsupported


def refuse(param: str, reason: str) -> PydanticCustomError:
    """What a check raises to blame a field of the object that it is of."""
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": reason})


class Body(BaseModel):
    """An object of a request. Null is as good as absent; unknown fields are ignored, unsupported ones refused."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        refuse_unsupported(fields, cls.model_fields)
        return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


class Request(Body):
    """Any request. model: None takes the one there is."""

    model: str | None = None
