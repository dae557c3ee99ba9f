"""Pipeline schedules as tables, and the runtime that executes any table in one compiled step."""

from taibai import refuse_hidden_packages

refuse_hidden_packages()
