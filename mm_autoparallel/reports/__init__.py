"""What people look at: tables for a terminal and traces for Perfetto, made of simulated results and nothing else."""
