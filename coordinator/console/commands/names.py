"""Names of the commands, in the order and with the words of `run --help`."""

LOCAL, GUEST = "local", "guest"
GROUPS = {
    "Start all nodes with one command": {
        LOCAL: "all nodes on this machine",
        "launch": "a node on each of several hosts, over ssh or on a Ray cluster",
        GUEST: "let this machine help a run to generate, for as long as you like",
        "with-ray": "start a Ray cluster for one command, with MASTER_ADDR",
    },
    "Look at a run": {
        "status": "where each node is, and what it waits for; --watch: live",
        "logs": "the output of the nodes, their engines and trainers",
        "report": "one HTML page: rewards, where the time goes, faults, samples",
        "samples": "read samples as the model saw them: --best, --worst, --flat",
        "diff": "where two runs diverge: iteration, task, sample and token",
        "plan": "does a model fit? would generating and training at once be faster?",
        "profile": "profile one training step with torch",
    },
    "Before and after": {
        "doctor": "check that directory, machine and network are fit for a run",
        "cleanup": "remove the files of an interrupted iteration",
        "verify": "check all checksums, and repeat an iteration to compare it",
        "fork": "start a new run from an iteration of this one",
        "rescore": "train again on existing samples with another reward",
        "eval": "score a checkpoint, or any model, on sets of tasks",
        "export": "copy a checkpoint's model, for the Hub or for a server",
    },
    "From another machine, over HTTP": {
        "serve": "accept jobs, start them, and show them on a web page",
        "submit": "submit a job; takes the options of `run`",
        "jobs": "list the jobs",
        "overwatch": "watch all jobs, or one, live",
        "stop": "stop a job",
        "resume": "continue a job that has ended",
        "fetch": "download a checkpoint's model, or the report",
    },
}
"""What `run --help` says of the commands."""


def as_help(arguments: list[str]) -> list[str]:
    """Return `run help X` and `run --help X` as `run X --help`; other arguments as they are."""
    if arguments == ["help"]:
        return ["--help"]
    is_question = len(arguments) == 2 and arguments[0] in ("help", "--help")
    return [arguments[1], "--help"] if is_question and not arguments[1].startswith("-") else arguments
