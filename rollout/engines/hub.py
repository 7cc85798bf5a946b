"""Fetching a model from the Hugging Face Hub: what transformers and engines read of it, and no more."""

from pathlib import Path

from rollout.engines.model_dir import ORIGINAL, OTHER_WEIGHTS, listed_weights

_PICTURES = ("png", "jpg", "jpeg", "gif", "svg", "webp", "mp4", "pdf")


class NotFetched(RuntimeError):
    """A model is not to be had from the Hub, nor on this machine; the message is the reason, in one line."""


def fetch_model(model: str) -> Path:
    """Return the directory of this machine that has a model of the Hub, fetched if need be. Raises
    NotFetched, and WeightsError for an index that names no files.
    """
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    ignored = [f"*{suffix}" for suffix in (*OTHER_WEIGHTS, *(f".{kind}" for kind in _PICTURES))]
    ignored += ["*.safetensors", f"{ORIGINAL}/*"]
    try:
        beside = Path(snapshot_download(model, ignore_patterns=ignored))
        snapshot_download(model, revision=beside.name, allow_patterns=listed_weights(beside))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise NotFetched(str(error).splitlines()[0]) from None
    return beside
