"""Settings of the samples of a source of tasks, where they differ. Importing this never imports torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from rollout.settings_tree import Settings
from trainer.choices import Advantage, Aggregation, Clip, ClipBound, Correction, Estimate, Overlong, Ratio

OF_LOSS = (
    *("ratio", "clip", "clip_low", "clip_high", "dual_clip", "aggregation", "kl", "kl_coefficient"),
    *("engine_correction", "engine_correction_cap", "engine_sequence_cap"),
)
"""The settings of a source that the loss of its tokens depends on; the others make the batch."""


def by_source(table: Any) -> Any:
    """Return the setting `trainer.sources` as a table by source, whose name may have dots: `a.b.weight` as it
    is typed, or tables within tables as TOML reads that.
    """
    if not isinstance(table, Mapping):
        return table
    tree = dict[str, Any]()
    for key, value in cast("Mapping[str, Any]", table).items():
        if isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value)
            is_name = inner and all(isinstance(below, Mapping) for below in inner.values())
            names = {f"{key}.{name}": below for name, below in inner.items()}
            for source, settings in (by_source(names) if is_name else {key: inner}).items():
                tree[source] = {**tree.get(source, {}), **settings}
            continue
        source, dot, field = key.rpartition(".")
        if not dot or isinstance(value, SourceSettings):
            tree[key] = value
        elif isinstance(tree.setdefault(source, {}), dict):
            tree[source][field] = value
        else:
            raise ValueError(f"trainer.sources.{key}: {source} is not a table; leave one of them out")
    return tree


class SourceSettings(Settings):
    """How the samples of tasks with this value of `rollout.ratio_field` differ. What is not given is as in
    `trainer`, or as in the source's own preset.
    """

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the advantages of the source's samples."""
    algorithm: str | None = None
    """The source's `trainer.algorithm`; its values hold for all settings down to `kl_coefficient`."""
    advantage: Advantage | None = None
    """The source's `trainer.advantage`; whitened over its tokens. Not pair or label."""
    keep_flat_groups: bool | None = None
    """The source's `trainer.keep_flat_groups`."""
    overlong: Overlong | None = None
    """The source's `trainer.overlong`."""
    overlong_buffer: Annotated[float, Field(gt=0, le=1)] | None = None
    """The source's `trainer.overlong_buffer`."""
    reward_threshold: float | None = None
    """The source's `trainer.reward_threshold`."""
    ratio: Ratio | None = None
    """The source's `trainer.ratio`."""
    clip: Clip | None = None
    """The source's `trainer.clip`."""
    clip_low: ClipBound | None = None
    """The source's `trainer.clip_low`."""
    clip_high: ClipBound | None = None
    """The source's `trainer.clip_high`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The source's `trainer.dual_clip`."""
    aggregation: Aggregation | None = None
    """The source's `trainer.aggregation`; what it divides by counts all sources."""
    engine_correction: Correction | None = None
    """The source's `trainer.engine_correction`."""
    engine_correction_cap: Annotated[float, Field(gt=0)] | None = None
    """The source's `trainer.engine_correction_cap`."""
    engine_sequence_cap: Annotated[float, Field(gt=1)] | None = None
    """The source's `trainer.engine_sequence_cap`."""
    kl: Estimate | None = None
    """The source's `trainer.kl`."""
    kl_to: Literal["base", "teacher"] | None = None
    """The source's `trainer.kl_to`; one for all with KL, in the loss."""
    kl_coefficient: Annotated[float, Field(ge=0)] | None = None
    """The source's `trainer.kl_coefficient`."""
