"""Turns conversations into tokens, and marks the tokens of the answers."""
