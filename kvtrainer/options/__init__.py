"""The options of a step, checked and ready for use."""
