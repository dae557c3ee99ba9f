"""Training: the commands, and the only place where model, mesh, data and checkpoints meet."""
