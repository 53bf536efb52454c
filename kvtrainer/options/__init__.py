"""The options of a step, checked and ready to use."""
