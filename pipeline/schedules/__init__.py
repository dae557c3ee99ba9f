"""Pipeline schedules as tables: rules, generators, CSV files, timing and drawing."""
