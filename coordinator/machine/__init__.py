"""Everything that runs on this machine: child processes, the engine, the trainer, the network, the GPUs.

To read: `children` (none outlives the node), `engine` with `weights`, `trainer`, `store` (copies of models),
`signals`; beside them facts about the machine.
"""
