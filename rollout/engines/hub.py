"""Fetching a model from the Hugging Face Hub: what transformers and engines read of it, and no more."""

import json
import shutil
from pathlib import Path
from typing import Any

from rollout.engines.model_dir import (
    INDEX,
    ORIGINAL,
    OTHER_WEIGHTS,
    WeightsError,
    check_model_dir,
    listed_weights,
)
from rollout.hub_reach import why_unreachable

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
        snapshot = Path(snapshot_download(model, ignore_patterns=ignored))
        snapshot_download(model, revision=snapshot.name, allow_patterns=listed_weights(snapshot))
    except HFValidationError as error:
        raise NotFetched(str(error).splitlines()[0]) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise NotFetched(why_unreachable() or _reason(model, error)) from None
    return snapshot


def _reason(model: str, error: Exception) -> str:
    """Return in one line why the Hub gives no files of a model."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    token = "set HF_TOKEN, or type `hf auth login`, on each machine"
    if isinstance(error, GatedRepoError):
        return f"its makers ask for consent: give it at https://huggingface.co/{model}, then {token}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no model of this name, or it is private: look at the name, or {token}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def fetch_shapes(directory: Path, model: str) -> Path:
    """Return a directory that has what a model of the Hub says of itself: its config.json, and the headers of
    its weights' files, which are holes behind them. It is `directory`, or the model's own if that was fetched
    before. Raises NotFetched.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(huggingface_hub.snapshot_download(model, local_files_only=True))
        check_model_dir(snapshot)
        return snapshot
    except (LocalEntryNotFoundError, HFValidationError, WeightsError):
        pass
    if unreachable := why_unreachable():
        raise NotFetched(unreachable)
    try:
        shutil.copy(huggingface_hub.hf_hub_download(model, "config.json"), directory)
        weights: Any = huggingface_hub.get_safetensors_metadata(model)
    except (
        Exception
    ) as error:  # of the library, and of the one by which it asks: all are the user's to repair
        raise NotFetched(_reason(model, error)) from None
    if weights.sharded:
        (directory / INDEX).write_text(json.dumps({"weight_map": weights.weight_map}))
    for name, file in weights.files_metadata.items():
        tensors = {
            tensor: {"dtype": facts.dtype, "shape": facts.shape, "data_offsets": facts.data_offsets}
            for tensor, facts in file.tensors.items()
        }
        header = json.dumps(tensors).encode()
        end = max((facts.data_offsets[1] for facts in file.tensors.values()), default=0)
        with open(directory / name, "wb") as written:
            written.write(len(header).to_bytes(8, "little") + header)
            written.truncate(8 + len(header) + end)
    return directory
