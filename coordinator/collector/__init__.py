"""The collector, a child process of the node that runs environments and rewards, and how it is ordered."""
