"""A Trainer's parameters and gradients in their places: flat storage, of one device or several."""
