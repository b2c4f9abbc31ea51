"""One folder a framework, with one entry point: its model files and launches are read, plans written into them."""
