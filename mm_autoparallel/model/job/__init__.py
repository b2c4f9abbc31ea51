"""What is planned: model, cluster, workload and strategy, and what is lawful together."""
