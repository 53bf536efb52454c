"""The engine: jobs, their members, rounds and tables. Pure logic; `server` gives it messages and the time."""
