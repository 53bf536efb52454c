"""How messages and weights travel between a server and workers: ZeroMQ over tcp, and shared memory."""
