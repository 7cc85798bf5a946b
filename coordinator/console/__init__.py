"""All that a person types and reads: commands, views, the report, the doctor, the plan, the jobs server."""
