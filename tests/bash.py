"""Programs of a few lines of bash that wait for a signal.

Not `while :; do sleep 0.02; done`: one time in 1,500, bash 5.2 spins for ever, its signals blocked, when one
comes as its child ends. These wait without a child.
"""

READY_TO_WAIT = "exec 9<> <(:)\n"
"""Comes before the first `trap`: a signal in this line would be an error of syntax."""
WAIT = "while :; do read -t 0.02 -u 9; done\n"
