"""What is written about checkpoints besides their manifests: leases, pins, validations and more."""
