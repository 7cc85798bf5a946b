"""Let vLLM load one model after another: for the page of models, and run by it.

    PYTHON -m scripts.models.vllm_server SOCKET

PYTHON has vLLM for CPUs. Each connection is served by a fork of this process, which saves importing vLLM. A
line of JSON comes in: {"model": a directory, "prompts": lists of token ids, "pictures": lists of files, a
prompt each}. A line goes out: {"rows": [[the number of a prompt, its token ids as vLLM has them, those of a
row, their logprobs], ...], "through": whose code the model is}, or {"failed": why}. The process ends at the
end of its standard input.
"""

import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.engines.admin import EXTENSION

LIMIT_S = 300
"""Then a fork ends, whatever it does; whoever asked finds the connection closed."""
SAMPLES, TOKENS = 2, 24
"""Rows of a prompt, tokens of a row."""


def main() -> None:
    """Serve until standard input ends."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine's own process would import vLLM again
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm  # noqa: F401  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models import registry  # pyright: ignore[reportMissingImports]

    registry._run_in_subprocess = _look_here
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen()
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        _reap()
        connection = listening.accept()[0]
        if os.fork() == 0:
            signal.alarm(LIMIT_S)
            listening.close()
            with connection, connection.makefile("rw") as lines:
                lines.write(json.dumps(_answer(json.loads(lines.readline()))) + "\n")
            os._exit(0)  # vLLM's threads do not end by themselves
        connection.close()


_unseen: list[Exception] = []
"""Why vLLM could not import a model's class, which it says in its log alone."""


def _look_here(look: Callable[[], Any]) -> Any:
    """Look at a model's class. vLLM does it in another interpreter, because CUDA does not survive a fork."""
    try:
        return look()
    except Exception as error:
        _unseen.append(error)
        raise


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return _generate(asked["model"], asked["prompts"], asked["pictures"])
    except Exception as error:  # whatever a family raises is what its cell says
        cause = _unseen[-1] if _unseen else error
        at = traceback.extract_tb(cause.__traceback__)[-1]
        said = str(cause) or f"{at.line} ({Path(at.filename).name})"
        return {"failed": f"{type(cause).__name__}: {said}"}


def _generate(model: str, prompts: list[list[int]], pictures: list[list[str]]) -> dict[str, Any]:
    """Generate before and after the weights are loaded anew and proved, as an engine does in a run."""
    from PIL import Image
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=2**28,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        worker_extension_cls=EXTENSION,
        **({"mm_processor_kwargs": {"use_fast": False}} if any(pictures) else {}),
    )
    sampling = SamplingParams(n=SAMPLES, max_tokens=TOKENS, logprobs=0, temperature=1.0)
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    for request, files in zip(asked, pictures, strict=True):
        if files:
            request["multi_modal_data"] = {"image": [Image.open(file).convert("RGB") for file in files]}
    rows: list[tuple[int, list[int], list[int], list[float]]] = []
    llm.collective_rpc("prove_content")
    for load in ((), ("reload_weights", "repack_kept_weights", "prove_content")):
        for method in load:
            given = {"reload_weights": {"weights_path": model}, "prove_content": {"path": model}}
            llm.collective_rpc(method, kwargs=given.get(method))
        llm.llm_engine.reset_encoder_cache()  # as the pause does in which a server loads weights
        for number, request in enumerate(llm.generate(asked, sampling, use_tqdm=False)):
            for row in request.outputs:
                ids = list(row.token_ids)
                logprobs = [at[one].logprob for at, one in zip(row.logprobs, ids, strict=True)]
                rows.append((number, list(request.prompt_token_ids), ids, logprobs))
    through = "transformers" if llm.model_config.using_transformers_backend() else "vLLM"
    return {"rows": rows, "through": through}


def _reap() -> None:
    """Wait for the forks that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # none is left
        pass


if __name__ == "__main__":
    main()
