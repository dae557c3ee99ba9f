"""Estimates the memory and the work of a traced step before it is compiled."""
