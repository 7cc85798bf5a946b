"""Say whether a model's files hold a value for each of its tensors: python -m trainer.model.check DIR

Reads headers only. Prints one line of JSON: why it cannot be trained (`refusal`), or which tensors in its
files are none of the model's (`unknown`).
"""

import json
import sys
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from rollout.engines.model_dir import WeightsError, tensor_names
from trainer.model.slices import blank_of_files


def main() -> None:
    """Print the line for the directory that the command line names."""
    disable_progress_bar()
    set_verbosity_error()
    directory = Path(sys.argv[1])
    try:
        unknown = blank_of_files(directory, tensor_names(directory), torch.float32)[1]
        print(json.dumps({"unknown": unknown}))
    except WeightsError as error:
        print(json.dumps({"refusal": str(error)}))


if __name__ == "__main__":
    main()
