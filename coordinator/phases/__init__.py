"""The protocol table, and what each of its phases does. `table` is the entry: it names each one's function,
and `run_phase` runs it.

     0       rollout: open the iteration; provenance: its origin, tasks: those that are drawn
     1       rollout, rollout_steps: plan which node makes which slots
     2       rollout, collecting: make this node's share (node_share)
     3, 4    rollout, rollout_steps: name the parts, write the manifest
     5, 6    evaluation; eval_sets: its named sets
     7       training: stop the engine
     8       batch
     9, 10   training: configure it, train
    11       training: publish the checkpoint; head_start: begin the next iteration's groups meanwhile
    12       training, load_policy: start the engine with the new policy
    13       metrics; it has old checkpoints and trajectories removed

Beside the phases: crews (when two crews open an iteration), guest_node and guest_loop, base_model.
"""
