from coordinator.run import Run as Run
