"""`run serve`: take jobs over HTTP, start them, and show them, until Ctrl+C. The jobs go on."""

import asyncio
import logging
import signal
import sys
from pathlib import Path

from aiohttp import web

from coordinator.console.commands.alone import alone
from coordinator.console.server.access import TokenCheck, find_token
from coordinator.console.server.app import Service
from coordinator.console.server.launchers import Launcher
from coordinator.machine.network import LOOPBACK
from coordinator.machine.signals import is_ignored_hangup
from coordinator.protocol.exits import Exit
from coordinator.settings.tree import SettingsError
from coordinator.start.log_path import check_log_path
from rollout.storage import files

MIB = 2**20
SHUTDOWN_S = 1.0


def serve(
    root: Path,
    launcher: Launcher,
    host: str = LOOPBACK,
    port: int = 0,
    token_file: Path | None = None,
    allow_code: bool = False,
    at_once: int = 1,
    max_upload_mib: int = 64,
) -> int:
    """Serve the jobs in `root` until a signal comes. SettingsError says what is wrong; then nothing began."""
    logging.basicConfig(level=logging.WARNING, format="run: %(message)s")
    check_log_path(root, "--root")
    with alone("run serve", "--root", root, "stop it first"):
        files.make_directory(root)
        token, where = find_token(root, token_file)
        service = Service(root, TokenCheck(token), launcher, allow_code, at_once, max_upload_mib * MIB)
        return asyncio.run(_serve(service, host, port, where))


async def _serve(service: Service, host: str, port: int, where: str) -> int:
    runner = web.AppRunner(service.app(), shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    ended = asyncio.Event()
    hangup = [] if is_ignored_hangup(signal.SIGHUP) else [signal.SIGHUP]
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise SettingsError(f"--host {host} --port {port}: {error.strerror}; give others") from None
        at = runner.addresses[0]
        print(f"jobs in {service.root} at http://{host}:{at[1]}; the token is in {where}", flush=True)
        if host not in {LOOPBACK, "localhost", "::1"}:
            print(
                "run: anybody on this network can read what is sent: better 127.0.0.1 and ssh -L",
                file=sys.stderr,
            )
        await ended.wait()
    finally:
        await runner.cleanup()
    return Exit.DONE
