"""Starts the processes of a run, on one machine or under a cluster scheduler."""

from taibai import refuse_hidden_packages

refuse_hidden_packages()
