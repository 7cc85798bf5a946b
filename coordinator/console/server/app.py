"""The paths of the server. Each handler reads the directory, in a thread: a shared filesystem may be slow."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from coordinator.console.server import jobs, submission
from coordinator.console.server.access import COOKIE, TokenCheck
from coordinator.console.server.jobs import Job, UnknownJob
from coordinator.console.server.launchers import Launcher
from coordinator.console.server.readings import (
    JobOutput,
    JobReader,
    checkpoint_of,
    file_of_checkpoint,
    metrics_of,
    report_of,
)
from coordinator.console.server.requests import HEADERS, body_of, number_after, number_of, object_of, refusal
from coordinator.console.server.starts import Conflict
from coordinator.console.server.waiting_jobs import begin_next
from coordinator.machine.run_command import ask_run
from coordinator.settings.tree import SettingsError
from rollout.storage.retry import SharedFsError

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the server looks for jobs that wait to be started."""
LOG_POLL_S = 0.5
CHECKS = 2
"""Submissions that are checked at the same time."""
HERE = Path(__file__).parent
PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Service:
    """What a server goes by. It has no state: that is in `root`."""

    root: Path
    access: TokenCheck
    launcher: Launcher = field(default_factory=Launcher)
    allow_code: bool = False
    at_once: int = 1
    """At most so many jobs run at the same time; the others are `submitted`, in order."""
    max_body_bytes: int = 64 * 2**20
    readings: JobReader = field(default_factory=JobReader)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CHECKS))

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=self.max_body_bytes, middlewares=[self._answer])
        get, post = app.router.add_get, app.router.add_post
        for path in PAGE:
            get(path, self.page)
        get("/login", self.is_known)
        post("/login", self.login)
        get("/jobs", self.list)
        post("/jobs", self.submit)
        get("/jobs/{name}", self.tell)
        get("/jobs/{name}/metrics", self.metrics)
        get("/jobs/{name}/logs", self.logs)
        get("/jobs/{name}/report", self.report)
        get("/jobs/{name}/checkpoint", self.checkpoint)
        get("/jobs/{name}/checkpoint/{iteration}/{file:.+}", self.checkpoint_file)
        post("/jobs/{name}/stop", self.stop)
        post("/jobs/{name}/resume", self.resume)
        post("/jobs/{name}/guest", self.guest)
        post("/jobs/{name}/cleanup", self.cleanup)
        app.cleanup_ctx.append(self._keep_jobs)
        return app

    # ---- who may, and what they are told if not

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse strangers, and answer every refusal with one line."""
        try:
            if request.path not in PAGE and request.path != "/login":
                self._refuse_stranger(request)
            response = await handler(request)
        except SettingsError as error:
            response = refusal(400, str(error))
        except UnknownJob as error:
            response = refusal(404, str(error))
        except Conflict as error:
            response = refusal(409, str(error))
        except web.HTTPException as error:
            response = refusal(error.status, error.text or error.reason)
        except SharedFsError as error:
            response = refusal(503, str(error))
        except Exception:  # a client gets an answer, whatever went wrong here
            log.exception("%s %s", request.method, request.path)
            response = refusal(500, "the server has failed; its log says why")
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
        return response

    def _refuse_stranger(self, request: web.Request) -> None:
        looks = request.method in {"GET", "HEAD"} and self.access.has_cookie(request.cookies.get(COOKIE, ""))
        if not looks and not self.access.has_token(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(
                text="no token, or a wrong one; give that of the server's --token-file"
            )

    # ---- the page

    async def page(self, request: web.Request) -> web.Response:
        """Give a file of the page; there is nothing in it of any job."""
        name, kind = PAGE[request.path]
        text = await asyncio.to_thread((HERE / name).read_text)
        return web.Response(text=text, content_type=kind, headers={"Content-Security-Policy": POLICY})

    async def is_known(self, request: web.Request) -> web.Response:
        """Say whether the browser has a cookie already."""
        return web.json_response({"known": self.access.has_cookie(request.cookies.get(COOKIE, ""))})

    async def login(self, request: web.Request) -> web.Response:
        """Give a browser that has the token a cookie, with which it can look but not change anything."""
        document = await object_of(request, "token")
        if not self.access.is_token(str(document.get("token", ""))):
            raise web.HTTPUnauthorized(text="this is not the token of the server")
        response = web.json_response({})
        response.set_cookie(COOKIE, self.access.cookie, httponly=True, samesite="Strict", path="/")
        return response

    # ---- jobs

    async def list(self, request: web.Request) -> web.Response:
        """List the jobs in the order of their submission."""

        return web.json_response({"jobs": await asyncio.to_thread(_listed, self)})

    async def submit(self, request: web.Request) -> web.Response:
        """Make a job, or find that it was made before."""
        parsed = submission.parse(await body_of(request, self.max_body_bytes))
        async with self.checks:
            await asyncio.to_thread(self._check, parsed)
        job = await asyncio.to_thread(jobs.submit, self.root, parsed)
        self.wake.set()
        return web.json_response(await asyncio.to_thread(self.readings.tell, job), status=201)

    def _check(self, parsed: submission.Submission) -> None:
        self.launcher.refuse(parsed.options)
        submission.check(parsed, self.launcher.decided, self.allow_code, self.launcher.kind == "local")

    async def _job(self, request: web.Request) -> Job:
        return await asyncio.to_thread(Job, self.root, request.match_info["name"])

    async def _told(self, job: Job) -> web.Response:
        return web.json_response(await asyncio.to_thread(self.readings.tell, job))

    async def tell(self, request: web.Request) -> web.Response:
        """Give all that is known of a job."""
        return await self._told(await self._job(request))

    async def metrics(self, request: web.Request) -> web.Response:
        """Give the lines of metrics from number `since` on."""
        job, since = await self._job(request), number_of(request, "since", 0)
        return web.json_response({"lines": await asyncio.to_thread(metrics_of, job, since)})

    async def report(self, request: web.Request) -> web.Response:
        """Give the page of `run report`."""
        text = await asyncio.to_thread(report_of, await self._job(request))
        # A page of its own, not of this server: what is in it cannot ask for more.
        alone = {"Content-Security-Policy": "sandbox allow-scripts allow-popups; frame-ancestors 'none'"}
        return web.Response(
            body=text.encode("utf-8", "replace"), content_type="text/html", charset="utf-8", headers=alone
        )

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Give the last lines of what a job prints; `follow`: and what comes until it has ended."""
        job, lines = await self._job(request), max(1, min(number_of(request, "lines", 20), 10_000))
        rank = number_of(request, "rank", 0) if "rank" in request.query else None
        follow = request.query.get("follow", "0") not in {"", "0"}
        output = await asyncio.to_thread(JobOutput, job, rank)
        text = await asyncio.to_thread(output.begin, lines)
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        await response.write(text.encode())
        with contextlib.suppress(ConnectionResetError):  # the client has seen enough
            while True:
                has_ended = await asyncio.to_thread(self._has_ended, job)
                text = await asyncio.to_thread(output.more, has_ended or not follow)
                if text:
                    await response.write(text.encode())
                if has_ended or not follow or request.transport is None or request.transport.is_closing():
                    break
                await asyncio.sleep(LOG_POLL_S)
        return response

    def _has_ended(self, job: Job) -> bool:
        return self.readings.tell(job)["state"] not in jobs.GOING | {"submitted"}

    async def checkpoint(self, request: web.Request) -> web.Response:
        """List the files of a checkpoint's model."""
        iteration = number_of(request, "iteration", 0) if "iteration" in request.query else None
        return web.json_response(await asyncio.to_thread(checkpoint_of, await self._job(request), iteration))

    async def checkpoint_file(self, request: web.Request) -> web.StreamResponse:
        """Give one of these files, or a range of its bytes."""
        iteration = request.match_info["iteration"]
        if not (iteration.isascii() and iteration.isdecimal() and len(iteration) < 10):
            raise UnknownJob("there is no such checkpoint")
        named = (int(iteration), request.match_info["file"])
        path = await asyncio.to_thread(file_of_checkpoint, await self._job(request), *named)
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    # ---- what is done to a job

    async def stop(self, request: web.Request) -> web.Response:
        """Stop a job."""
        job = await self._job(request)
        now = (await object_of(request, "now")).get("now", False)
        await asyncio.to_thread(job.stop, self.launcher, now is True)
        self.readings.forget(job)
        return await self._told(job)

    async def resume(self, request: web.Request) -> web.Response:
        """Ask for another start of a job that has ended."""
        job = await self._job(request)
        advice = "give the number of the start that has ended, as `start` in the job"
        after = await number_after(request, advice)
        status = await asyncio.to_thread(self.readings.tell, job)
        if status["start"] == after and status["state"] in jobs.GOING:
            raise Conflict(f"{job.name} has not ended: nothing to resume")
        await asyncio.to_thread(job.resume, after)
        self.readings.forget(job)
        self.wake.set()
        return await self._told(job)

    async def guest(self, request: web.Request) -> web.Response:
        """Let this machine help a job that runs (`run guest`)."""
        job = await self._job(request)
        after = await number_after(request, "give how many `guests` are in the job")
        state = (await asyncio.to_thread(self.readings.tell, job))["state"]
        if state not in jobs.GOING:
            raise Conflict(f"{job.name} is {state}: a guest helps a job that runs")
        await asyncio.to_thread(job.add_guest, after)
        self.readings.forget(job)
        return await self._told(job)

    async def cleanup(self, request: web.Request) -> web.Response:
        """Call `run cleanup` on a job; 409 in its words if it refuses."""
        job = await self._job(request)
        document = await object_of(request, "iteration", "dry_run", "keep_partial")
        words = [
            "cleanup",
            "--iteration",
            str(document.get("iteration", "")),
            "--log-path",
            str(job.log_path),
        ]
        words += ["--dry-run"] if document.get("dry_run") is True else []
        words += ["--keep-partial"] if document.get("keep_partial") is True else []
        ended = await asyncio.to_thread(ask_run, words, None, jobs.environment(), None)
        if ended.returncode:
            line = (ended.stderr.strip().splitlines() or ["run cleanup failed"])[-1].removeprefix("run: ")
            raise SettingsError(line) if ended.returncode == 2 else Conflict(line)
        self.readings.forget(job)
        return web.json_response({"text": ended.stdout})

    # ---- starting what waits

    async def _keep_jobs(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._begin_jobs())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _begin_jobs(self) -> None:
        """Start the jobs that wait, and tell those that are stopped; at once after a request."""
        while True:
            try:
                await asyncio.to_thread(begin_next, self.root, self.launcher, self.readings, self.at_once)
            except Exception:  # of one job; the others must go on
                log.exception("looking for jobs that wait")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), LOOK_S)
            self.wake.clear()


def _listed(service: Service) -> "list[dict[str, Any]]":
    listed: list[dict[str, Any]] = []
    for job in jobs.all_jobs(service.root):
        try:
            listed.append(service.readings.list(job))
        except Exception:  # a job whose files are damaged hides no other
            log.exception("job %s", job.name)
    return listed
