"""Arrow data to batches: schema, conversion, world-independent order, files, loader, synthetic data with planted truth."""
