"""From a job and a strategy to the numbers of a pipeline: time, memory and traffic of every block."""
