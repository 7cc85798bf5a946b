"""Say whether a model's files hold a value for each of its tensors: python -m trainer.model.check DIR [LORA]

Reads headers only. Prints one line of JSON: why it cannot be trained (`refusal`), or which tensors in its
files are none of the model's (`unknown`). With LORA, settings as JSON, also why the model cannot have such
adapters (`adapters`).
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from rollout.engines.model_dir import WeightsError, tensor_names
from trainer.model import lora
from trainer.model.slices import blank_of_files
from trainer.settings import LoraSettings


def main() -> None:
    """Print the line for the directory that the command line names."""
    disable_progress_bar()
    set_verbosity_error()
    directory = Path(sys.argv[1])
    try:
        model, unknown = blank_of_files(directory, tensor_names(directory), torch.float32)
    except WeightsError as error:
        print(json.dumps({"refusal": str(error)}))
        return
    try:
        for text in sys.argv[2:]:
            warnings.simplefilter("ignore")
            lora.wrap(model, LoraSettings.model_validate_json(text))
        print(json.dumps({"unknown": unknown}))
    except lora.LoraError as error:
        print(json.dumps({"adapters": " ".join(str(error).split())}))


if __name__ == "__main__":
    main()
