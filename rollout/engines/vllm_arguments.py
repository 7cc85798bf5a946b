"""Ask vLLM whether it would start with arguments, without a server and without weights:

    python -m rollout.engines.vllm_arguments --model DIR [ARGUMENT ...]

Runs in vLLM's environment. Exits with 2 if vLLM refuses them, and prints why in one line.
"""

import sys
from typing import Any

REFUSED = 2
"""The exit status for arguments that vLLM refuses."""


def main(words: list[str]) -> int:
    """Parse the arguments, and make vLLM's configuration of them and the model's."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # type: ignore
        from vllm.platforms import current_platform  # type: ignore
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore
    except ImportError:  # another release has them elsewhere: its server will say what it refuses
        return 0
    if not current_platform.device_type:  # built for GPUs, and this machine has none
        return 0
    parser: Any = make_arg_parser(FlexibleArgumentParser())
    parser.error = _refuse
    args = parser.parse_args(words)
    try:
        validate_parsed_serve_args(args)
        AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        errors = getattr(error, "errors", list)()  # pydantic's
        _refuse(_first_text(errors[0]) if errors else str(error))
    return 0


def _first_text(error: dict[str, Any]) -> str:
    names = ".".join(map(str, error["loc"]))
    return f"{names}: {error['msg']}, got {error['input']!r}" if names else error["msg"]


def _refuse(reason: str) -> None:
    print(" ".join(reason.split()), flush=True)
    sys.exit(REFUSED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
