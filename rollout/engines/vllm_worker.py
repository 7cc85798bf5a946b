"""Extend vLLM's workers: reload on a CPU, and proof of what they compute with (--worker-extension-cls).

This runs in the workers.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn

from rollout.engines.content import Proof, check_adapter, content_sum, saved_sums
from rollout.engines.model_dir import ADAPTER_WEIGHTS, adapter_scale

Pieces = dict[str, list[int]]


class WorkerExtension:
    """Methods that vLLM adds to its worker class."""

    get_model: Any
    vllm_config: Any
    model_runner: Any
    rank: int
    _content_proof: Proof | None = None

    def repack_kept_weights(self) -> None:
        """Pack the weights again in every layer that also keeps the unpacked ones.

        On a CPU vLLM computes with packed copies of the weights. Its reload packs only layers that tensors
        were loaded for. An output layer that is tied to the embedding is not among them, and would go on with
        the old weights, without an error.
        """
        for layer in self.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def scheduler(self) -> dict[str, int | None]:
        """Return the settings that bound how many samples this replica generates at the same time."""
        config = self.vllm_config.scheduler_config
        return {name: getattr(config, name, None) for name in ("max_num_seqs", "max_num_active_seqs")}

    def prove_content(self, path: str | None = None, adapter: str | None = None) -> list[str]:
        """Compare the weights that this replica computes with to those of the model directory `path`, and of
        the adapter in a directory. Without `path`: to those it has loaded last; what differs then, vLLM
        changes when it loads it. Return the blocks that are not proved (see content.Proof).

        Raises WrongContent for any other difference, in the replica's last rank alone: vLLM reads the answers
        of the ranks in order up to the first error, and takes what is left for the answer to its next call.
        """
        config, proof = self.vllm_config, self._content_proof or Proof()
        self._content_proof = proof
        if not path and proof.has_begun:
            return proof.unproved
        directory = path or _loaded_from(config)
        if directory is None:
            return proof.unproved
        group = _world()
        share = (group.rank_in_group, group.world_size) if group else (0, 1)
        try:
            facts = _facts(self, directory, adapter, share)
        except Exception as error:  # the other ranks wait for this one's facts
            facts = f"{type(error).__name__}: {error}"
        everyones: list[Any] = [facts]
        if group:
            everyones = [None] * group.world_size
            dist.all_gather_object(everyones, facts, group=group.cpu_group)
        try:
            return _compared(proof, everyones, path, adapter)
        except Exception:
            if self.rank == config.parallel_config.world_size - 1:
                raise
            return []


def _loaded_from(config: Any) -> str | None:
    """Return the directory that vLLM has loaded its model from; if it was given the name of a model on the
    Hub, its snapshot on this machine. None if there is none.
    """
    model = config.model_config.model
    if Path(model).is_dir():
        return model
    try:
        return snapshot_download(
            model,
            revision=config.model_config.revision,
            cache_dir=config.load_config.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError):  # not in the cache; not a name of the Hub's
        return None


def _compared(
    proof: Proof, everyones: list[dict[str, Any] | str], path: str | None, adapter: str | None
) -> list[str]:
    """Return the blocks that are not proved, from the facts of all ranks. WrongContent if others differ."""
    facts = [answer for answer in everyones if not isinstance(answer, str)]
    if failed := [answer for answer in everyones if isinstance(answer, str)]:
        raise RuntimeError(failed[0])
    expected = {name: total for answer in facts for name, total in answer["saved"].items()}
    served = _joined(answer["served"] for answer in facts)
    buffers = _joined(answer["buffers"] for answer in facts)
    served |= {name: sums for name, sums in buffers.items() if name in expected}
    if path is None:
        proof.begin(expected, served)
        return proof.unproved
    proof.check(expected, served)
    if adapter is not None:
        slots = [_joined(answer["slots"][slot] for answer in facts) for slot in facts[0]["slots"]]
        check_adapter(facts[0]["adapter"], slots)
    return proof.unproved


def _facts(worker: Any, directory: str, adapter: str | None, share: tuple[int, int]) -> dict[str, Any]:
    """Return this rank's sums: of its share of the files, and of all that it computes with."""
    served, buffers = _served(worker.get_model())
    facts: dict[str, Any] = {
        "saved": saved_sums(directory, worker.vllm_config.model_config.dtype, share),
        "served": served,
        "buffers": buffers,
    }
    if adapter is not None:
        facts["adapter"] = _adapter_sums(adapter, worker.vllm_config.lora_config.lora_dtype)
        facts["slots"] = _slots(worker.model_runner.lora_manager._adapter_manager)
    return facts


def _served(model: nn.Module) -> tuple[Pieces, Pieces]:
    """Return the sums of the parameters that this rank computes with, and of the buffers. A tied one comes
    once.
    """
    served: Pieces = {}
    buffers: Pieces = {}
    tensor_ids: set[int] = set()
    for prefix, layer in model.named_modules():
        prefix = prefix.replace(".base_layer", "")  # around it are adapters
        for sums, tensors in (
            (served, layer.named_parameters(recurse=False)),
            (buffers, layer.named_buffers(recurse=False)),
        ):
            for name, tensor in tensors:
                if tensor.is_floating_point() and id(tensor) not in tensor_ids:
                    tensor_ids.add(id(tensor))
                    for part, total in _sums(layer, tensor).items():
                        sums.setdefault(f"{prefix}.{name}{part}", []).append(total)
        for part, total in _packed(layer).items():
            served.setdefault(f"{prefix}.weight{part}", []).append(total)
    return served, buffers


def _sums(layer: nn.Module, tensor: Tensor) -> dict[str, int]:
    """Return the sums of the parts that ranks may have replicas of: tensor parallelism beyond the number of
    key heads copies keys and values, but not queries. Else one part, without a name.
    """
    attention: Any = layer
    if getattr(attention, "num_kv_head_replicas", 1) == 1 or not tensor.numel():
        return {"": content_sum(tensor)}
    heads, keys = attention.num_heads * attention.head_size, attention.num_kv_heads * attention.head_size
    parts = tensor.split([heads, keys, len(tensor) - heads - keys])
    return {f"#{name}": content_sum(part) for name, part in zip("qkv", parts, strict=True)}


def _packed(layer: nn.Module) -> dict[str, int]:
    """Return the sums of the weight that the packed copy in a layer was made of; empty if it has none."""
    return getattr(getattr(layer, "cpu_linear", None), "packed_from", {})


def _watch_packing() -> None:
    """Have vLLM bind to each packed copy of a weight, on a CPU, the sums of what it was made of.

    The copy is in a layout of oneDNN's that cannot be read, and the weight itself is dropped.
    """
    from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]

    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_bind(layer: Any, remove_weight: bool) -> None:
        sums = {} if layer.weight.is_meta else _sums(layer, layer.weight)
        pack(layer, remove_weight)
        compute: Any = getattr(layer, "cpu_linear", None)
        if getattr(compute, "__closure__", None):  # it holds a copy; else it is given the weight
            compute.packed_from = sums

    utils.dispatch_cpu_unquantized_gemm = pack_and_bind


def _pack_experts_again() -> None:
    """Have vLLM pack experts on a CPU after each load. 0.32 does it after the first one alone, and then
    computes with unpacked ones as if they were packed: wrong outputs, without an error.
    """
    from vllm.model_executor.layers.fused_moe import (  # pyright: ignore[reportMissingImports]
        unquantized_fused_moe_method as module,
    )

    set_up = module.UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(method: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        again = method.moe_kernel is not None
        set_up(method, layer, w13, w2)
        if again:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    module.UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack


def _adapter_sums(directory: str, dtype: torch.dtype) -> dict[str, int]:
    """Return name -> sum of an adapter's tensors as vLLM computes with them: B is multiplied by the scale."""
    scale = adapter_scale(directory)
    sums: dict[str, int] = {}
    for name, tensor in load_file(Path(directory) / ADAPTER_WEIGHTS).items():
        tensor = tensor.to(dtype)
        sums[name] = content_sum(tensor * scale if ".lora_B." in name else tensor)
    return sums


def _slots(manager: Any) -> dict[int, Pieces]:
    """Slot -> the sums of the adapter in it, for each slot in use."""
    slots: dict[int, Pieces] = {}
    for slot in (index for index, adapter in enumerate(manager.lora_index_to_id) if adapter is not None):
        slots[slot] = {
            f"{name}.{kind}": [content_sum(stack[slot]) for stack in _stacks(layer, kind)]
            for name, layer in manager.modules.items()
            for kind in ("lora_a", "lora_b")
        }
    return slots


def _stacks(layer: Any, kind: str) -> tuple[Tensor, ...]:
    """Return all slots of a layer's adapters, (slots, ...), for each tensor that is fused in it."""
    stacks = getattr(layer, f"{kind}_stacked", ())
    return (stacks,) if isinstance(stacks, Tensor) else tuple(stacks)


def _joined(ranks: Iterable[Pieces]) -> Pieces:
    joined: Pieces = {}
    for pieces in ranks:
        for name, sums in pieces.items():
            joined.setdefault(name, []).extend(sums)
    return joined


def _world() -> Any:
    """vLLM's group of all ranks of this replica; None if it has one."""
    from vllm.distributed.parallel_state import get_world_group  # pyright: ignore[reportMissingImports]

    group = get_world_group()
    return group if group.world_size > 1 else None


def _on_cpu() -> bool:
    if not find_spec("vllm"):
        return False
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return current_platform.is_cpu()


if _on_cpu():
    _watch_packing()
    _pack_experts_again()
