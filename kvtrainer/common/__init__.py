"""What all of the package uses."""
