"""Tell what of a model makes features of pictures: vision tower and projector."""

from typing import Any

from torch import nn


def vision_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters, by the model's own names, that no text meets: all but decoder and head."""
    causal = _causal(model)
    if getattr(getattr(causal, "config", None), "vision_config", None) is None:
        return {}
    text = {id(parameter) for part in _text_parts(causal) for parameter in part.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in text}


def vision_modules(model: Any) -> list[str]:
    """Return the names of the outermost modules that hold nothing else but such parameters."""
    vision = {id(parameter) for parameter in vision_parameters(model).values()}
    outermost: list[str] = []
    for name, module in model.named_modules():
        parameters = {id(parameter) for parameter in module.parameters()}
        if parameters and parameters <= vision and not any(name.startswith(f"{o}.") for o in outermost):
            outermost.append(name)
    return outermost


def freeze(model: Any) -> None:
    """Keep the vision tower and projector as they are."""
    for parameter in vision_parameters(model).values():
        parameter.requires_grad_(False)


def _causal(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _text_parts(causal: Any) -> list[nn.Module]:
    return [part for part in (causal.get_decoder(), causal.get_output_embeddings()) if part is not None]
