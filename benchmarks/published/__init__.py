"""Published speeds next to predictions for the same jobs: commands, jobs and results.

`make reproduce` runs both commands and writes the tables of docs/published.md.
"""
