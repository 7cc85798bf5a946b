"""The request of a training phase, and the documents that it leaves. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rollout.storage.hashing import FileFacts
from trainer.settings import TrainerSettings

RESULT = "result.json"
"""The file that is written last into a checkpoint: it lists the files with checksums."""
STATE_DIR = "trainer_state"
"""In a checkpoint: the folder of the trainer's state that was saved with it; no engine has a use for it."""
PROOF = "proof.json"
"""In a checkpoint: the digests that lead from the base model to its weights."""


def _as_recorded(settings: Any) -> Any:
    """Return recorded settings with what held for those that are younger than the document."""
    return {"freeze_vision": False, **settings} if isinstance(settings, Mapping) else settings


Recorded = Annotated[TrainerSettings, BeforeValidator(_as_recorded)]
"""The settings of a training that is over."""


class DamagedDocument(ValueError):
    """The bytes are not the document that was expected."""


class _Document(BaseModel):
    """An immutable JSON document; an unknown or missing field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_json(self) -> bytes:
        """Return the document as JSON bytes."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Return the document in `data`; raises DamagedDocument."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DamagedDocument(f"not a {cls.__name__}: {error}") from error


class TrainedBatch(_Document):
    """The batch of an earlier iteration, and the settings that it was trained with."""

    iteration: int
    policy: str
    """Digest of the weights after this training."""
    batch_file: str
    batch_sha256: str
    settings: Recorded
    max_tokens: int
    iterations: int | None = None


class Resume(_Document):
    """Where the optimizer's state comes from, unless it is the base's own `trainer_state/`."""

    state_dir: str | None = None
    """A complete trainer state, for the base's policy or an earlier one; null: the base's own, or none."""
    state_policy: str | None = None
    """Digest of the weights that the state belongs to."""
    from_start: bool = False
    """No state was saved yet: training is repeated from the model that the run started from."""
    repeat: tuple[TrainedBatch, ...] = ()
    """The batches that the state's policy was trained on since, up to the base, in order."""


class TrainRequest(_Document):
    """Asks for one training phase. Every rank of the job gets the same, except that paths may be mounted
    elsewhere."""

    iteration: int
    epoch: int
    """The cluster's epoch; only recorded."""
    batch_file: str
    batch_sha256: str
    base_dir: str
    """Hugging Face directory to start from; its `trainer_state/` is continued, if it has one."""
    base_policy: str
    """Digest of the weights in `base_dir`."""
    model_dir: str
    """Hugging Face directory of the model that the run started from. Adapters belong to it, and `settings.kl`
    holds the policy close to it."""
    model_name: str
    """Where all nodes find that model, for those who load the adapters later: `model_dir` may be a copy."""
    resume: Resume = Resume()
    """Used by a job that has to load the base."""
    staging_dir: str
    """All ranks write the new checkpoint here, and global rank 0 its `result.json` last. It exists and is
    empty."""
    state_dir: str | None = None
    """All ranks write the trainer state here in the background, its `state.json` last. It exists and is
    empty. Given if settings.save_interval is above 1 and divides the iteration."""
    images_dir: str | None = None
    """Where the run's pictures are, if it may have some."""
    profile: str | None = None
    """Local rank 0 profiles its first optimizer step, and writes this with `.json.gz`, then with `.txt`."""
    ahead: bool = False
    """Whether new weights are copied to the nodes for their engines before the checkpoint is durable."""
    copy_dir: str | None = None
    """Where this node's ranks put that copy: an empty directory of its machine; null: it wants none."""
    delta: bool = False
    """Whether a delta to the policy before is written beside the weights."""
    offload: bool = False
    """Whether the ranks free the GPU for an engine afterwards."""
    rank_weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    """One weight for each global training rank; a rank's share of the tokens follows its weight."""
    seed: int
    settings: TrainerSettings
    max_tokens: Annotated[int, Field(ge=1)]
    """The longest completion that could be sampled in this iteration."""
    iterations: Annotated[int, Field(ge=1)] | None = None
    """The last iteration of the run, where settings.schedule ends; null: not known."""

    def span(self) -> tuple[float, float]:
        """Return the fractions of the run's iterations that are over before and after this one."""
        if self.iterations is None:
            return 0.0, 0.0
        return min(1.0, (self.iteration - 1) / self.iterations), min(1.0, self.iteration / self.iterations)


class SavedState(_Document):
    """The `state.json` of a complete trainer state directory."""

    format: int
    iteration: int
    policy: str
    """Digest of the weights that the state belongs to."""
    optimizer_step: int
    entropy_control: tuple[float, float] | None = None
    """With trainer.entropy_target: the bonus of the next step, and the entropy of the last one."""
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
    settings: Recorded
    max_tokens: int
    iterations: int | None = None
    """How the policy was trained, as the request asked."""
    metrics: dict[str, float]
    """loss, grad_norm, lr, kl_engine, kl_reference, entropy, clip_fraction, effective_samples, age, age_max,
    tokens, sequences, tokens_per_s, seconds."""
