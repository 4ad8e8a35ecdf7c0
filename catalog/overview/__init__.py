"""What a run looks like from its catalog alone."""
