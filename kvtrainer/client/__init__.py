"""A worker's side of the protocol: sessions, rounds, and memory shared with servers."""
