"""Environments: what turns a task into samples, in one turn or many.

To read: `environment` (what one is), `policy` (what it generates with), `calculator` (an example of many
turns), `openai_proxy` (for agents that ask an OpenAI API); beside them the built-in ones.
"""
