"""The embedded engine: a server on PyTorch that needs neither a GPU nor vLLM."""
