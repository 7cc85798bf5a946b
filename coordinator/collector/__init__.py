"""The collector, a child process of the node that runs environments and rewards, and how it is ordered.

To read: `order` (what a node asks for), `host` and `listener` (the node's side), `process` and `collection`
(the child's side), `making` (the groups in flight), `claimed_slots` (where its slots come from, if nodes
claim them). Beside them: `mailbox` between the two, `rest_of_order` when a collector has died,
`guest_chunks`, `unfinished_samples`.
"""
