"""How the processes of a job for MXNet's launcher find each other: they meet at the scheduler, once.

`messages` is the wire contract, `table` and `attendance` are the scheduler's state without sockets and clocks, and
`sockets` has the sockets of all roles.
"""
