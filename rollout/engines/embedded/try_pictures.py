"""Try in a process of its own whether a model can be shown pictures: that takes torch."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from rollout.engines.model_dir import companions, copied
from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.pool import ProcessPool

DEADLINE_S = 300.0
"""How long it may take; most take some seconds, with imports."""
_SAID = 300
"""Characters of a library's error that are said."""


def why_no_pictures(model_dir: Path) -> str:
    """Return why the model of a directory cannot be shown pictures, in one line; empty if nothing speaks
    against it before its weights are loaded.
    """
    try:
        with closing(ProcessPool(f"{__name__}:trying", size=1)) as pool:
            return pool.call(str(model_dir), deadline_s=DEADLINE_S)
    except (CallFailed, CallLost) as error:
        return f"trying it failed: {error}"


def trying() -> Callable[[str], str]:
    """Return the function that the process calls: from a model's directory to the reason."""
    import torch
    from transformers import AutoConfig

    from rollout.engines.embedded.picture_input import PictureReader
    from rollout.engines.embedded.weights import auto_model

    def reason(model_dir: str) -> str:
        with copied(model_dir, companions(model_dir)) as copy:
            try:
                config = AutoConfig.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
                with torch.device("meta"):
                    model = auto_model(config.model_type).from_config(config)
                if not hasattr(model.base_model, "get_image_features"):
                    return f"a {type(model).__name__} of transformers has no part for them"
                _ = PictureReader(copy).example
            except Exception as error:  # of files, of a missing library, of code that is not run
                words = " ".join(str(error).replace(str(copy), model_dir).split())
                return f"{type(error).__name__}: {words:.{_SAID}}"
        return ""

    return reason
