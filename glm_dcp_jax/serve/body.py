"""What all bodies of requests have in common."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from glm_dcp_jax.serve.field_texts import describe_fields
from glm_dcp_jax.serve.unsupported import refuse_unsupported


def refuse(param: str, reason: str) -> PydanticCustomError:
    """What a check raises to blame a field of the object that it is of."""
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": reason})


def refuse_for(
    error: ValidationError, called: Callable[[str], str] = lambda field: field
) -> PydanticCustomError:
    """What a check raises if a part of its object is not what it should be. called: the client's name of a field."""
    problem = error.errors()[0]
    named = [problem["ctx"]["param"]] if "param" in problem.get("ctx", {}) else []
    field = ".".join(str(part) for part in [*problem["loc"], *named])
    return refuse(called(field), problem["msg"].removeprefix("Value error, "))


class Body(BaseModel):
    """An object of a request. Null is as good as absent; unknown fields are ignored, unsupported ones refused."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=describe_fields)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields without support that only this object's API has, each with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        refuse_unsupported(fields, cls.model_fields, cls.unsupported)
        return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


class Request(Body):
    """Any request. model: None takes the one there is."""

    model: str | None = None
