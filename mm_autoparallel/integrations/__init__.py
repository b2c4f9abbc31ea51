"""One folder a training framework: it writes a plan into the framework's own files and reads it back from them."""
