"""What is said before a start about memory and time."""

from typing import Any

import pytest

from coordinator.settings.loading import build
from coordinator.start.estimate import (
    _adapted,
    cpu_time_text,
    disk_text,
    is_whole_on_each_node,
    memory_text,
    time_text,
)
from trainer.settings import TrainerSettings

GB = 1e9
WIDTH, WIDE, DEPTH, VOCABULARY = 4096, 12288, 36, 151936
LAYER = {"q_proj": (WIDTH, WIDTH), "k_proj": (1024, WIDTH), "up_proj": (WIDE, WIDTH), "norm": (WIDTH,)}
TENSORS = {
    "model.embed_tokens.weight": (VOCABULARY, WIDTH),
    "lm_head.weight": (VOCABULARY, WIDTH),
    **{f"model.layers.{n}.{name}.weight": shape for n in range(DEPTH) for name, shape in LAYER.items()},
}
LAYERS = DEPTH * (WIDTH * (WIDTH + 1024 + WIDE) + WIDTH)
ENDS = 2 * VOCABULARY * WIDTH
NF4 = "trainer.lora.base_dtype=nf4"


def _sums(tensors: dict[str, Any]) -> list[int]:
    return list(_adapted(tensors, "all-linear"))


def held(**settings: Any) -> float:
    """GB of one GPU that has enough."""
    text = memory_text(TENSORS, TrainerSettings(**settings), 1, 1e15)
    assert text.endswith(" or more of each GPU, which has 1000000")
    return float(text.split()[2])


def test_memory_is_the_sum_of_its_parts() -> None:
    inputs = 2 * WIDTH * 8192 * DEPTH
    rest = (inputs + 1e9 + 6 * ENDS / 2) / GB  # the head's chunk takes more than a layer
    whole = 16 * (LAYERS + ENDS) / GB
    assert held() == pytest.approx(whole + rest, abs=0.1)
    kept = 2 * 8192 * DEPTH * (4 * WIDE + 16 * WIDTH)
    assert held(activation_checkpointing=False) == pytest.approx(whole + rest + (kept - inputs) / GB, abs=0.1)
    assert held(kl="k3") == pytest.approx(whole + rest + 2 * (LAYERS + ENDS) / GB, abs=0.1)
    shared = 8 * DEPTH * (2 * WIDTH)  # rank x the widths of what has an adapter
    adapters: dict[str, Any] = {"lora": {"rank": 8, "targets": "q_proj"}}
    layer = 2 * 8192 * (8 * WIDE + 16 * WIDTH)
    least = (2 * (LAYERS + ENDS) + 18 * shared + inputs + layer) / GB
    assert held(**adapters) == pytest.approx(least, abs=0.1)
    assert held(**adapters, kl="k3") == held(**adapters)
    coarse = {"lora": {**adapters["lora"], "base_dtype": "nf4"}}
    codes = least + ((0.5625 - 2) * (LAYERS - DEPTH * WIDTH) + 2 * WIDE * WIDTH) / GB
    assert held(**coarse) == pytest.approx(codes, abs=0.1)
    experts = {"model.layers.0.mlp.experts.0.up_proj.weight": (WIDE, WIDTH)}  # peft gives them none
    assert _sums(TENSORS | experts) == _sums(TENSORS)
    everywhere = 8 * DEPTH * (WIDTH + WIDTH + 1024 + WIDTH + WIDE + WIDTH)
    assert held(lora={"rank": 8}) == pytest.approx(least + 18 * (everywhere - shared) / GB, abs=0.1)


@pytest.mark.parametrize(
    ("settings", "count", "gpu_bytes", "cure"),
    [
        ({}, 8, 80 * GB, ""),  # sharded by itself
        ({"layout": "replicated"}, 8, 70 * GB, "trainer.layout=sharded"),
        ({"max_tokens_per_microbatch": 262144}, 8, 80 * GB, "trainer.max_tokens_per_microbatch=65536"),
        ({}, 1, 40 * GB, "trainer.layout=sharded trainer.cpu_offload=true"),
        ({"cpu_offload": True, "layout": "sharded"}, 1, 6 * GB, "take more GPUs, or a smaller model"),
        ({"lora": {"rank": 4}}, 1, 6 * GB, "take more GPUs, or a smaller model"),
        ({"lora": {"rank": 4}}, 1, 8 * GB, f"{NF4} trainer.max_tokens_per_microbatch=4096"),
        ({"max_tokens_per_microbatch": 32768, "kl": "k3"}, 1, 30 * GB, f"trainer.lora.rank=16 {NF4}"),
    ],
)
def test_too_little_memory_says_what_to_lower(
    settings: dict[str, Any], count: int, gpu_bytes: float, cure: str
) -> None:
    text = memory_text(TENSORS, TrainerSettings(**settings), count, gpu_bytes)
    assert text.partition(": too little; ")[2].removeprefix("it fits with ") == cure


def test_each_of_several_nodes_may_hold_a_whole_model() -> None:
    def text(layout: str, nodes: int, gpu_bytes: float) -> str:
        return memory_text(TENSORS, TrainerSettings(layout=layout), 16, gpu_bytes, nodes)  # pyright: ignore

    assert text("hybrid", 2, 80 * GB) == memory_text(TENSORS, TrainerSettings(layout="sharded"), 8, 80 * GB)
    assert text("hybrid", 8, 44 * GB).endswith("too little; it fits with trainer.layout=sharded")
    assert text("auto", 2, 80 * GB) == text("hybrid", 2, 80 * GB) != text("sharded", 2, 80 * GB)
    assert text("auto", 8, 44 * GB) == text("sharded", 8, 44 * GB), "two GPUs have no room for all"
    small = memory_text(TENSORS, TrainerSettings(), 16, 80 * GB, 2, 96 * GB)
    assert small == text("sharded", 2, 80 * GB), "no room for its state in the engine's turn"


@pytest.mark.parametrize(
    ("settings", "processes", "gpu_gb", "host_gb", "is_whole"),
    [
        ({}, [8, 8], [80, 80], [512, 512], True),
        ({}, [8, 8, 8], [80, 80, 40], [512, 512, 512], True),
        ({}, [8, 8], [80, 12], [512, 512], False),  # no room for an eighth and its activations
        ({}, [8, 4], [80, 80], [512, 512], False),
        ({}, [1, 1], [80, 80], [512, 512], False),
        ({}, [8], [80], [512], False),
        ({}, [8, 8], [80, None], [512, 512], False),
        ({}, [8, 8], [80, 80], [512, 96], False),  # its state has 61 GB
        ({"lora": {"rank": 8}}, [8, 8], [80, 80], [512, 96], True),
        ({"layout": "sharded"}, [8, 8], [80, 80], [512, 512], False),
        ({"cpu_offload": True}, [8, 8], [80, 80], [512, 512], False),
        ({"shard_from_parameters": 1e12}, [8, 8], [80, 80], [512, 512], False),
    ],
)
def test_hybrid_is_chosen_where_nodes_are_alike_and_have_room(
    settings: dict[str, Any], processes: list[int], gpu_gb: list[Any], host_gb: list[int], is_whole: bool
) -> None:
    sizes = [size and size * GB for size in gpu_gb], [size * GB for size in host_gb]
    assert is_whole_on_each_node(TENSORS, TrainerSettings(**settings), processes, *sizes) == is_whole


def test_what_it_says_to_lower_is_enough() -> None:
    text = memory_text(TENSORS, TrainerSettings(), 1, 40 * GB)
    typed = dict(word.split("=") for word in text.rpartition("with ")[2].split())
    lower = build({"model": "any/model", **{key: value == "true" or value for key, value in typed.items()}})
    assert "too little" not in memory_text(TENSORS, lower.trainer, 1, 40 * GB)


def test_time_is_for_samples_of_full_length() -> None:
    given = {"model": "any/model", "rollout.tasks_per_iteration": 64, "rollout.max_tokens": 1000}
    text = time_text(int(70e9), build(given), 2, ["NVIDIA H100 80GB HBM3"] * 2)
    # 512 samples on 2 GPUs: 1000 steps of 140 GB at 3.35 TB/s; 8 x 70e9 x 512,000 FLOP at 40 % of 2 x 989e12
    assert text == "an iteration generates for 42 s and trains for 6 min if samples have 1000 tokens"
    slower = time_text(int(70e9), build(given), 2, ["NVIDIA H100", "NVIDIA A100-SXM4-80GB"])
    assert slower == "an iteration generates for 70 s and trains for 19 min if samples have 1000 tokens"
    # 512,000 tokens from two replicas, however fast their GPUs are
    text = time_text(int(8e9), build(given), 2, ["NVIDIA H100 80GB HBM3"] * 2)
    assert text == "an iteration generates for 14 s and trains for 41 s if samples have 1000 tokens"


def test_small_model_reaches_less_of_the_peak_on_a_gpu() -> None:
    settings = build({"model": "any/model", "rollout.tasks_per_iteration": 64, "rollout.max_tokens": 1000})
    # 8 x 1e9 x 512,000 FLOP at 17 % of 989e12
    assert " trains for 24 s " in time_text(int(1e9), settings, 1, ["NVIDIA H200"])


def test_training_computes_with_the_experts_that_a_token_goes_to() -> None:
    settings = build({"model": "any/model"})
    times = [time_text(int(30e9), settings, 1, ["NVIDIA H100"], active=n) for n in (None, int(3e9))]
    assert times[0].split(" trains")[0] == times[1].split(" trains")[0] and times[0] != times[1]


def test_time_on_cpus_comes_from_their_measured_speed() -> None:
    given = {
        "model": "any/model", "rollout.tasks_per_iteration": 16, "rollout.samples_per_task": 8,
        "rollout.max_tokens": 24, "engine.dtype": "float32",
    }  # fmt: skip
    text = "an iteration generates for {} and trains for {} if samples have 24 tokens"
    assert cpu_time_text(int(135e6), build(given), 1, 100e9) == text.format("33 s", "83 s")
    assert cpu_time_text(int(135e6), build(given), 3, 100e9) == text.format("11 s", "28 s")
    exact = {**given, "engine.dtype": "float64"}
    both = "66 s (33 s with engine.dtype=float32)"
    assert cpu_time_text(int(135e6), build(exact), 1, 100e9) == text.format(both, "83 s")
    defaults = build({"model": "any/model"})
    assert "generates for 25 h (13 h with engine.dtype=float32) and trains for 31 h" in cpu_time_text(
        int(135e6), defaults, 1, 100e9
    )


@pytest.mark.parametrize(
    ("given", "on_gpu", "text"),
    [
        (
            {},
            False,
            "an iteration writes 0.54 GB of weights, 1.6 GB to resume from (the optimizer's state); "
            "3 are kept: 6.5 GB; trainer.save_interval=10 writes that every 10 iterations",
        ),
        (
            {"trainer.save_interval": 10, "checkpoints.keep_last": 2},
            True,
            "an iteration writes 0.27 GB of weights, every 10 iterations 1.6 GB to resume from (the "
            "optimizer's state); 2 are kept",
        ),
    ],
)
def test_what_a_checkpoint_weighs_and_how_often_it_is_written(
    given: dict[str, Any], on_gpu: bool, text: str
) -> None:
    settings = build({"model": "any/model", **given})
    assert disk_text(int(135e6), int(135e6) * 12, settings, on_gpu) == text


def test_written_samples_are_not_generated() -> None:
    given = {"model": "any/model", "rollout.tasks_per_iteration": 512, "rollout.max_tokens": 1000}
    for algorithm, samples in (("sft", 512), ("dpo", 1024)):
        settings = build({**given, "trainer.algorithm": algorithm})
        train_s = 8 * 8e9 * samples * 1000 / (0.4 * 989e12)
        said = f"an iteration trains for {train_s:.0f} s if samples have 1000 tokens"
        assert time_text(int(8e9), settings, 1, ["NVIDIA H100"]) == said.replace("166 s", "3 min")


@pytest.mark.parametrize("names", [[], ["NVIDIA GB10"], ["NVIDIA H100", "Tesla T4"]])
def test_nothing_is_said_about_the_time_on_unknown_gpus(names: list[str]) -> None:
    assert time_text(int(8e9), build({"model": "any/model"}), 1, names) == ""


def test_vision_tower_is_held_in_two_bytes_and_gets_no_adapters_unless_it_is_trained() -> None:
    names = ("vision_tower.encoder.layers.{}.q_proj", "model.visual.blocks.{}.q_proj", "visual.merger.mlp.{}")
    tower = {f"{name.format(n)}.weight": (WIDTH, WIDTH) for name in names for n in range(2)}

    def needed(tensors: dict[str, Any], **settings: Any) -> float:
        return float(memory_text(tensors, TrainerSettings(**settings), 1, 1e15).split()[2])

    size = 6 * WIDTH * WIDTH / GB
    assert needed(TENSORS | tower) == pytest.approx(held() + 2 * size, abs=0.1)
    assert needed(TENSORS | tower, freeze_vision=False) > held() + 15 * size
    adapters: dict[str, Any] = {"lora": {"rank": 1024}}
    assert needed(TENSORS | tower, **adapters) == pytest.approx(held(**adapters) + 2 * size, abs=0.1)
    assert needed(TENSORS | tower, **adapters, freeze_vision=False) > held(**adapters) + 4 * size
