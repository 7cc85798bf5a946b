"""The real protocol code of several nodes in one process, under a scheduler that owns the clock.

    scheduler.py   tasks (threads that run one at a time), processes, the clock, what replaces `threading`
    disk.py        every call on the shared directory: a yield point, where nodes are killed, paused, frozen
    loop.py        asyncio with that clock
    children.py    child processes without processes; trainers.py, engines.py: what they do
    patches.py     what takes the place of what in the product's modules
    world.py       the machines of a run: starts, kills, restarts, until the run has ended
    faults.py      what can happen, and when
    invariants.py  what must hold, watched at every change on disk and at the end

Everything else is the product: START, GATHER, watch threads, phases, resume, parts, manifests, metrics, with
real files in a directory. A run of three nodes and two iterations takes well under a second.
"""
