"""Where a Trainer's gradients meet those of other workers: which store, and how it is used."""
