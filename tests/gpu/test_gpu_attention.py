"""The real kernels of attention, on a GPU: they work here, and compute what the dense mask does."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.tiny_models import make_batch, tiny_config
from trainer.batch.packing import PACKED, Packing, plan_step
from trainer.model.attention import Kernel
from trainer.model.learner import Learner
from trainer.model.rounding import Rounding
from trainer.model.token_logprobs import Scorer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler


@pytest.mark.parametrize(
    ("family", "works"),
    [
        ("qwen3", [Kernel.VARLEN, Kernel.FLEX]),
        ("gemma3_text", [Kernel.VARLEN, Kernel.FLEX]),
        ("gpt_oss", [Kernel.FLEX]),
    ],
)
def test_kernels_compute_scores_and_gradients_of_the_dense_mask(
    family: str, works: list[Kernel], device: torch.device
) -> None:
    torch.manual_seed(0)
    config = tiny_config(family, head_dim=32)
    model = AutoModelForCausalLM.from_config(config).float().to(device)
    learner = Learner(Scorer(model, device, Rounding(torch.bfloat16, torch.bfloat16), torch.bfloat16))
    learner.arrange(share_prompts=True)
    assert learner.arrangement.works == works, str(learner.arrangement)
    batch = make_batch()
    parameters = list(learner.parameters.values())
    for packing, kernels in ((PACKED, works), (Packing(pairs_per_token=1e6), [Kernel.FLEX])):
        one = plan_step(batch, range(len(batch)), [1.0], 0, 1000, packing)[0]
        assert (one.segments is not None) == (packing is not PACKED)
        found = {}
        for kernel in (Kernel.OWN, *kernels):
            scores = learner._run(learner.scorer, one, kernel=kernel)[0]
            gradients = torch.autograd.grad(scores.mean(), parameters, allow_unused=True)
            found[kernel] = torch.cat([g.flatten() for g in gradients if g is not None])
            print(f"{family} {kernel.value}: norm of the gradient {found[kernel].norm():.4f}")
        for kernel in kernels:
            cosine = torch.cosine_similarity(found[kernel], found[Kernel.OWN], dim=0)
            assert cosine > 0.99, kernel
