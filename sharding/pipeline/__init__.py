"""Pipeline parallelism: schedules as tables, and the runtime that executes any table."""
