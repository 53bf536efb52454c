"""The pipeline of a step, stage by stage."""
