"""A server that the user runs: of what kind it is, and what it can do, only itself knows."""

import sys

from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import GENERATE, EngineError
from rollout.engines.kinds.kind import EngineKind, ServerSettingError
from rollout.settings import EngineSettings

TIMEOUT_S = 10.0
"""How long it may take to answer a question that it can answer at once."""


class ByUrl(EngineKind):
    """The server at `engine.url`."""

    has_other_template = True

    def __init__(self, settings: EngineSettings, gpus: int, python: str = sys.executable) -> None:
        super().__init__(settings, gpus, python)
        self.dtype = f"{settings.url}", ""
        self.name = f"the server at {settings.url}"

    def check(self) -> None:
        assert self.settings.url is not None
        if self.settings.deterministic:
            raise ServerSettingError(
                f"engine.deterministic=true with --engine-url {self.settings.url}: it is for servers that "
                "the run starts; leave one of them out"
            )
        try:
            EngineAdmin(self.settings.url, timeout_s=TIMEOUT_S).check()
        except EngineError as error:
            error_text = " ".join(str(error).split())
            raise ServerSettingError(
                f"--engine-url {self.settings.url}: no engine answers there ({error_text}); start it, and "
                "wait until it is ready, or leave --engine-url out: then each node starts its own"
            ) from None

    def check_pictures(self, most: int) -> None:
        url = self.settings.url
        assert url is not None
        admin = EngineAdmin(url, timeout_s=TIMEOUT_S, drain_timeout_s=TIMEOUT_S)
        try:
            if not admin.facts().renders_pictures:
                admin.try_generate()
        except EngineError as error:
            raise ServerSettingError(
                f"--engine-url {url}: pictures go to it by POST {GENERATE}, and it answers "
                f"{' '.join(str(error).split())}; start vLLM with --enable-scale-out"
            ) from None
