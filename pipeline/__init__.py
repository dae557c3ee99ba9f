"""Pipeline schedules as tables, and the runtime that executes any table in one compiled step."""
