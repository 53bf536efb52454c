"""The weights of one server: where they lie, how gradients are summed, and how updates are applied."""
