"""Names of the commands, in the order and with the words of `run --help`."""

LOCAL, GUEST = "local", "guest"
GROUPS = {
    "Start all nodes with one command": {
        LOCAL: "all nodes on this machine",
        "launch": "a node on each of several hosts, over ssh, or of a Ray cluster",
        GUEST: "help a run that goes on with this machine, for as long as you like",
        "with-ray": "a Ray cluster for one command, with MASTER_ADDR",
    },
    "Look at a run": {
        "status": "where each node is, and what it waits for; --watch: live",
        "logs": "what the nodes, their engines and trainers print",
        "report": "one page: rewards, where the time goes, faults, samples",
        "samples": "read samples as the model saw them: --best, --worst, --flat",
        "diff": "where two runs part: iteration, task, sample and token",
        "plan": "would two crews be faster, with which devices and weights?",
        "profile": "where the time of one training step goes, by torch's profiler",
    },
    "Before and after": {
        "doctor": "is this directory, node and network fit for a run?",
        "cleanup": "remove what an interrupted iteration left",
        "verify": "is all that is kept whole, and does an iteration come out the same again?",
        "fork": "go on from an iteration as a new run, with other settings",
        "rescore": "train anew on samples that are there, with another reward",
        "eval": "score a checkpoint, or any model, on sets of tasks",
        "export": "copy a checkpoint's model, for the Hub or for a server",
    },
    "From another machine, over HTTP": {
        "serve": "take jobs, start them, show them on a page",
        "submit": "submit a job; with the options of `run`",
        "jobs": "list the jobs",
        "overwatch": "show the jobs, or one, live",
        "stop": "stop a job",
        "resume": "go on with a job that has ended",
        "fetch": "fetch a checkpoint's model, or the report",
    },
}
"""What `run --help` says of the commands."""
