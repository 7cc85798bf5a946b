"""Train a policy on a batch of trajectories, and write the checkpoint.

The coordinator builds the batch (`batch`) and starts the training job (`job`). Each rank of the job reads the
batch and the base model. It writes its share of the checkpoint into the staging directory of the request, and
its share of the trainer state there or into the request's state directory. All of these are on the shared
directory, so ranks write them through `rollout.storage` alone: `writer` for the files, `files` for the JSON
documents that come last. Ranks and their node also exchange files in the spool, a directory on the node's own
disk (`job.launch`).

Rooms, top first: job; checkpoint and update; model; batch. A room imports the rooms below it, and the files
beside them.
"""
