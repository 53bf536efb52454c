"""The weights of one server: their memory, sums of gradients, and updates."""
