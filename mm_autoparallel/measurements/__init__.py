"""Published measurements: read, predicted from their configuration alone, scored."""
