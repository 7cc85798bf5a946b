"""Everything that runs on this machine: child processes, the engine, the trainer, the network, the GPUs."""
