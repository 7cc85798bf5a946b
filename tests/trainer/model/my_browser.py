"""An agent that clicks in a browser and sees the screen."""

import asyncio
import base64
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from rollout import Episode, Policy, Sample, Sampling, Task

CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--remote-debugging-port=0"]
SPOT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}
CLICK = {"type": "function", "function": {"name": "click", "parameters": SPOT}}
READY = "new Promise(done => document.readyState == 'complete' ? done() : onload = done)"


async def browsers(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    policy = policy.with_tools([CLICK])
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(browser(task, policy.episode(j))) for j in range(sampling.n)]
    return [run.result() for run in runs]


async def browser(task: Task, episode: Episode) -> Sample:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(*CHROMIUM, f"--user-data-dir={folder}")
        try:
            url = f"http://127.0.0.1:{await port_in(Path(folder, 'DevToolsActivePort'))}/json"
            async with aiohttp.ClientSession() as http, http.get(url) as tabs:
                tab = (await tabs.json())[0]["webSocketDebuggerUrl"]
                async with http.ws_connect(tab, max_msg_size=0) as socket:
                    return await play(task, episode, socket)
        finally:
            process.kill()
            await process.wait()


async def port_in(file: Path) -> str:
    """The port that a browser writes in its own time: the file is there before its two lines are."""
    async with asyncio.timeout(60.0):
        while not file.exists() or len(words := file.read_text().split()) < 2:
            await asyncio.sleep(0.1)
    return words[0]


async def play(task: Task, episode: Episode, socket: Any) -> Sample:
    async def devtools(method: str, **parameters: Any) -> Any:
        await socket.send_json({"id": 1, "method": method, "params": parameters})
        return (await socket.receive_json()).get("result")  # None: the model's arguments are wrong

    async def screen() -> dict[str, Any]:
        await devtools("Runtime.evaluate", expression=READY, awaitPromise=True)
        shot = await devtools("Page.captureScreenshot")
        return {"type": "image", "image": base64.b64decode(shot["data"])}

    await devtools("Page.navigate", url=task["page"])
    question = {"type": "text", "text": task["prompt"]}
    turn = await episode.generate([{"role": "user", "content": [await screen(), question]}])
    while turn.calls and len(episode.turns) < 6:
        new = []
        for call in turn.calls:
            spot = {axis: call.arguments.get(axis) for axis in "xy"} | {"button": "left", "clickCount": 1}
            for kind in ("mousePressed", "mouseReleased"):
                await devtools("Input.dispatchMouseEvent", type=kind, **spot)
            new.append({"role": "tool", "tool_call_id": call.id, "content": [await screen()]})
        turn = await episode.generate(new)
    title = await devtools("Runtime.evaluate", expression="document.title")
    return episode.sample(reward=float(title["result"]["value"] == task["answer"]))
