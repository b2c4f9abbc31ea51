"""What no placement of a problem can beat, without a solver."""
