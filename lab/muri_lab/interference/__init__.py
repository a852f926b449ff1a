"""How two models slow each other down: measured by hand, and lines and curves fitted to that."""
