"""The commands beside `run` itself, by name. Their files parse, then call."""

from coordinator.console.commands import parse_before_after, parse_inspect, parse_server, parse_start

COMMANDS = {**parse_start.APPS, **parse_inspect.APPS, **parse_before_after.APPS, **parse_server.APPS}
