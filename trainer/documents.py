"""What one training phase is asked to do, and what it answers. Torch-free."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.storage.files import FileFacts
from trainer.settings import TrainerSettings


class DamagedDocument(ValueError):
    """The bytes are not the document that was expected."""


class _Document(BaseModel):
    """An immutable JSON document; an unknown or missing field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_json(self) -> bytes:
        """The document as JSON bytes."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """The document in `data`; raises DamagedDocument."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DamagedDocument(f"not a {cls.__name__}: {error}") from error


class TrainedBatch(_Document):
    """A batch that an earlier iteration was trained on, and how."""

    iteration: int
    policy: str
    """Digest of the weights that this training made."""
    batch_file: str
    batch_sha256: str
    settings: TrainerSettings
    max_tokens: int


class Resume(_Document):
    """Where the optimizer's state comes from when it does not lie in the base's own `trainer_state/`."""

    state_dir: str | None = None
    """A complete trainer state, of the base's policy or of an earlier one; null: the base's own, or none."""
    state_policy: str | None = None
    """Digest of the weights that it belongs to."""
    from_start: bool = False
    """No state was saved yet: the model that the run started from stands in for one."""
    repeat: tuple[TrainedBatch, ...] = ()
    """What that policy was trained on since, up to the base, in order."""


class TrainRequest(_Document):
    """One training phase. The same for every rank of the job, apart from where paths are mounted."""

    iteration: int
    epoch: int
    """Of the cluster; only recorded."""
    batch_file: str
    batch_sha256: str
    base_dir: str
    """Hugging Face directory to start from; its `trainer_state/`, where there is one, is continued."""
    base_policy: str
    """Digest of the weights in `base_dir`."""
    model_dir: str
    """Hugging Face directory of the model that the run started from, which adapters belong to, and which
    `settings.kl` holds the policy close to."""
    resume: Resume = Resume()
    """For a job that has to load the base."""
    staging_dir: str
    """Exists and is empty; all ranks write the new checkpoint here, global rank 0 its `result.json` last."""
    state_dir: str | None = None
    """With settings.save_interval above 1, in iterations that it divides: exists and is empty, and gets the
    trainer state in the background, its `state.json` last."""
    offload: bool = False
    """Whether the GPU is to be left to an engine afterwards."""
    rank_weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    """One per global training rank; a rank's share of the tokens follows its weight."""
    seed: int
    settings: TrainerSettings
    temperature: Annotated[float, Field(gt=0)]
    """The sampling temperature of the batch; logits are divided by it."""
    max_tokens: Annotated[int, Field(ge=1)]
    """Longest completion that was sampled."""


class SavedState(_Document):
    """The `state.json` of a complete trainer state."""

    format: int
    iteration: int
    policy: str
    """Digest of the weights that the state belongs to."""
    optimizer_step: int
    files: dict[str, FileFacts]
    """Every other file of the directory."""


class TrainResult(_Document):
    """The `result.json` of a complete staging directory."""

    iteration: int
    policy: str
    """Digest of the new weights; equal to `base_policy` when there was nothing to learn from."""
    base_policy: str
    batch_sha256: str
    files: dict[str, FileFacts]
    """Every other file of the directory, by its path below it."""
    steps: int
    """Optimizer steps of this phase."""
    optimizer_step: int
    """Optimizer steps of the whole run."""
    settings: TrainerSettings | None = None
    max_tokens: int | None = None
    """How it was trained, as the request said; null in a checkpoint of an older version."""
    metrics: dict[str, float]
    """loss, grad_norm, lr, kl_engine, kl_reference, entropy, clip_fraction, tokens, sequences, tokens_per_s,
    seconds."""
