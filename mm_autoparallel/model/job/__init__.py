"""What is planned: model, cluster, workload and strategy, read from files and checked."""
