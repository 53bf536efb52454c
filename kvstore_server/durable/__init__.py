"""Memory of a server that outlives its process: descriptors in a store, a log of the state, and an undo journal."""
