"""Training: the commands, and the only place where model, mesh, data and checkpoints meet."""

from taibai import refuse_hidden_packages

refuse_hidden_packages()
