"""Stage profiles of models: the record, the store, dry-run measuring, telemetry."""
