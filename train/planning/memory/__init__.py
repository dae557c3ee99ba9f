"""Plans whether a step fits into memory, and which settings would make it fit."""
