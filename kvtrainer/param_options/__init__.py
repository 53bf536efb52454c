"""Options that depend on the parameter: rules, where they apply, and what became of it."""
