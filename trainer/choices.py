"""The names that settings of the batch and the loss choose from, for all tasks and for those of
a source. A new loss begins with a name here. Importing this never imports torch.
"""

from typing import Annotated, Literal

from pydantic import Field

Advantage = Literal[
    "centred",
    "standardised",
    "leave_one_out",
    "success",
    "whitened",
    "decoupled",
    "one",
    "zero",
    "pair",
    "label",
]
Ratio = Literal["token", "sequence"]
Clip = Literal["ppo", "dual", "cispo", "soft", "geometric", "divergence", "none", "likelihood"]
Aggregation = Literal["token", "sequence", "sum", "constant"]
Correction = Literal["off", "truncated", "masked"]
Estimate = Literal["off", "k1", "k2", "k3"]
Overlong = Literal["keep", "penalise", "drop"]
ClipBound = Annotated[float, Field(ge=0)]
