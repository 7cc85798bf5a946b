"""Parse the JSON bodies of requests to a server; build the body of an error."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, StrictStr, ValidationError


class BadRequest(ValueError):
    """The request is answered with 400 and this message."""


class Body(BaseModel):
    """A JSON body. Unknown fields are accepted, as in vLLM."""

    model_config = ConfigDict(extra="allow", frozen=True)
    model: StrictStr | None = None


class GenerationBody(Body):
    """A body that asks for generated text."""

    stop: StrictStr | list[StrictStr] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], data: bytes) -> AnyBody:
    """Parse a request's body. BadRequest names the field and the reason."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where}: {first['msg']}" if where else first["msg"]) from error


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
