"""Load the policy into PyTorch, lay it out over ranks, compute logprobs; make the built-in model.

To read: `loading`, `token_logprobs`, then `policy`, which scores tokens, and `learner`, which is trained.
`parallel` lays a model out over ranks; `packed_sequences` and `arrangement` lay sequences into rows.
"""
